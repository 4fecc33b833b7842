"""BasicMotions: which of four motions a watch has measured, 100 steps of six channels.

Attention over 25 chunks of four steps. The set is in the packages sktime and aeon (datasets/data);
all was chosen by cross-validation within the 40 training series.

Command: regard train basic_motions data=BasicMotions, then: regard eval runs/basic_motions
         data=BasicMotions
Takes:   nine seconds of one core
Gives:   40 of 40 test series; 40 of 40 within train (5 folds); 68,932 parameters
"""

TASK = "series"
DATA = "BasicMotions"
SETTINGS = {
    "valid": "0.1",
    "size": "tiny",
    "chunk": "4",
    "steps": 200,
    "valid_every": 200,
}
