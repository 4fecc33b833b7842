"""Flickr8k without captions: an encoder that tells two views of a photo from all others (SimCLR).

What learns to see here goes into the captioner of the recipe flickr8k_caption.

Command: regard train flickr8k_pretrain data=flickr8k
Takes:   not measured yet
Gives:   not measured yet
"""

TASK = "pretrain"
DATA = "flickr8k"
SETTINGS = {
    "objective": "contrastive",
    "family": "resnet",
    "size": "small",
    "widths": "32,64,128,256",
    "depths": "2,2,2,2",
    "image": 64,
    "augment": "zoom+flip+jitter+grey",
    "least": 0.2,
    "temperature": 0.2,
    "batch": 256,
    "lr": 0.001,
    "ema": 0.999,
    "minutes": 58,
}
