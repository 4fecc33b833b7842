"""Flickr8k: what a photo shows, in a sentence, without any weights from elsewhere.

Five people wrote about each of 6,000 photos. The encoder is best trained first on the photos alone.

Command: regard train flickr8k_pretrain, then:
         regard train flickr8k_caption init=runs/flickr8k_pretrain, and the same with blind=true
         out=runs/flickr8k_blind; with decoder=recurrent doubly_stochastic=1, or normalise=sample;
         then: regard eval runs/flickr8k_caption data=flickr8k part=valid shuffle=true
         against=runs/flickr8k_blind
Takes:   not measured yet
Gives:   not measured yet
"""

TASK = "caption"
DATA = "flickr8k"
SETTINGS = {
    "family": "resnet",
    "size": "small",
    "widths": "32,64,128,256",
    "depths": "2,2,2,2",
    "image": 64,
    "augment": "flip+crop",
    "pieces": 4000,
    "captions": 5,
    "batch": 32,
    "dropout": 0.2,
    "label_smoothing": 0.1,
    "encoder_rate": 0.3,
    "lr": 0.0007,
    "ema": 0.999,
    "minutes": 58,
}
