"""Tasks on text: a file each, and beside them what several share."""
