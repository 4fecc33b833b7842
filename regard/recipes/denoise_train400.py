"""Train400: attention learns the filter; a small denoiser for grey images, noise of 5 to 55.

Command: regard train denoise_train400 data=denoise/Train400, then:
         regard eval RUN data=denoise/BSD68 sigma=15,25,50 filters=denoise/Train400
Takes:   18 minutes on 2 cores
Gives:   31.35, 28.90 and 25.95 dB on BSD68 at sigma 15, 25 and 50; 668,500 parameters
"""

TASK = "denoise"
DATA = "denoise/Train400"
SETTINGS = {
    "valid": "0.04",
    "size": "small",
    "noise": "5,55",
    "optimiser": "muon",
    "lr": 0.004,
    "processes": 2,
    "batch": 8,
    "ema": 0.998,
    "minutes": 18,
}
