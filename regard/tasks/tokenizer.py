"""The old place of `regard.pretrained.tokenizer_folder`, until every task has moved."""

from regard.pretrained.tokenizer_folder import (  # noqa: F401
    export_tokenizers,
    load_tokenizer_file,
)
from regard.pretrained.tokenizer_folder import load_tokenizer as load_any_tokenizer  # noqa: F401
from regard.pretrained.tokenizer_folder import load_tokenizers as load_any_tokenizers  # noqa: F401
from regard.pretrained.tokenizer_folder import save_tokenizers as save_any_tokenizers  # noqa: F401
