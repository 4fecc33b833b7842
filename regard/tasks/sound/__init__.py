"""Tasks on sounds: transcripts and labels."""
