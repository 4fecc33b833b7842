"""Captions of drawn scenes, "a red circle left of a blue square": the starter scenes.

A small ResNet sees 48x48 pixels as 12x12 places; a GRU with soft attention writes. Drawings are
made by bench/scenes.py out=runs/scenes-data; bench/pointing.py judges captions and attention.

Command: regard train drawn_scenes data=runs/scenes-data
Takes:   2 minutes on one core
Gives:   98.3% of 1,000 test captions exactly right; the place that a word attends to most lies in
         its object for 96.5% of colours and 84.7% of shapes; 453,504 parameters
"""

TASK = "caption"
DATA = "runs/scenes-data"
SETTINGS = {
    "family": "resnet",
    "image": 48,
    "model.stem": "large",
    "model.stem_width": 32,
    "model.widths": "64",
    "model.depths": "4",
    "decoder": "recurrent",
    "cell": "gru",
    "cell_width": 96,
    "attention": "bilinear",
    "decoder.cell.order": "after",
    "dropout": 0.1,
    "label_smoothing": 0.0,
    "pieces": 400,
    "max_length": 16,
    "captions": 1,
    "batch": 32,
    "augment": "flip+crop",
    "padding": 2,
    "lr": 0.003,
    "warmup": 100,
    "steps": 2500,
    "valid_every": 1250,
    "valid_images": 100,
    "threads": 1,
}
