"""JapaneseVowels: which of nine speakers says /ae/, 7 to 29 steps of twelve cepstral channels.

The set is in the packages sktime and aeon (datasets/data); all was chosen by cross-validation
within the 270 training series.

Command: regard train japanese_vowels data=JapaneseVowels, then: regard eval runs/japanese_vowels
         data=JapaneseVowels
Takes:   half a minute of one core
Gives:   98.38% of the 370 test series (95%: 96.5 to 99.3); 98.5% within train (one encoder,
         5 folds); 346,285 parameters in five encoders
"""

TASK = "series"
DATA = "JapaneseVowels"
SETTINGS = {
    "valid": "0.05",
    "size": "tiny",
    "chunk": "2",
    "members": 5,
    "steps": 400,
    "valid_every": 400,
}
