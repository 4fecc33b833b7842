"""Tasks on images: labels, encoders without labels, captions, noise."""
