"""JapaneseVowels: which of nine speakers says /ae/, 7 to 29 steps of twelve cepstral channels.

The set is in the packages sktime and aeon (datasets/data); all was chosen by cross-validation
within the 270 training series.

Command: regard train japanese_vowels data=JapaneseVowels, then: regard eval runs/japanese_vowels
         data=JapaneseVowels
Takes:   TODO
Gives:   TODO
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
