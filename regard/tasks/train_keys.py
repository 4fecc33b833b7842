"""Keys of `train` for each task, for type checkers; written by bench/train_keys.py."""

# ruff: noqa
# fmt: off
from pathlib import Path
from typing import Any, Literal, TypedDict


class Given(TypedDict, total=False):
    data: Any; valid: Any; test: Any; out: str | Path | None; init: str | Path | None
    size: str | None; minutes: float | None; steps: int | None; epochs: float | None
    lr: float | None; batch_tokens: int | None; dropout: float | None; seed: int | None
    device: str | None; callbacks: Any; quiet: bool; use: Any

Common = TypedDict("Common", {
"async": Any, "async_": Any, "attention_dropout": Any, "average": Any, "batches": Any,
"beta2": Any, "callback_error": Any, "clip": Any, "compile": Any, "depth": Any, "dtype": Any,
"ema": Any, "ffn_width": Any, "heads": Any, "layer_decay": Any, "log": Any, "lora_alpha": Any,
"lora_on": Any, "lora_rank": Any, "norm": Any, "optimiser": Any, "parallel": Any,
"patience": Any, "position": Any, "probes": Any, "processes": Any, "recompute": Any,
"restarts": Any, "save_every": Any, "schedule": Any, "threads": Any, "timeout": Any,
"tune": Any, "valid_every": Any, "warmup": Any, "watch_every": Any, "weight_decay": Any,
"width": Any, "workers": Any
}, total=False)
class OtherKeys(Given, Common): ...

Translate = Literal["translate", "multi30k_en_de", "ladder_multi30k", "decoder_multi30k", "tatoeba_en_zh"]
TranslateOwn = TypedDict("TranslateOwn", {
"attention": Any, "bpe_dropout": Any, "cell": Any, "columns": Any, "direction": Any,
"feed_forward": Any, "from": Any, "header": Any, "joined": Any, "kernel": Any, "kv_heads": Any,
"label_smoothing": Any, "like": Any, "loss": Any, "max_length": Any, "normalise": Any,
"order": Any, "pieces": Any, "r_drop": Any, "readout": Any, "skip_bad": Any, "source": Any,
"target": Any, "to": Any, "tokenizer": Any, "valid_sentences": Any, "vocabularies": Any
}, total=False)
class TranslateKeys(Given, Common, TranslateOwn): ...

Prefix = Literal["prefix"]
PrefixOwn = TypedDict("PrefixOwn", {
"bias": Any, "bpe_dropout": Any, "columns": Any, "feed_forward": Any, "from": Any,
"header": Any, "joined": Any, "kv_heads": Any, "label_smoothing": Any, "like": Any, "loss": Any,
"max_length": Any, "order": Any, "pieces": Any, "r_drop": Any, "skip_bad": Any, "source": Any,
"target": Any, "to": Any, "tokenizer": Any, "valid_sentences": Any, "vocabularies": Any
}, total=False)
class PrefixKeys(Given, Common, PrefixOwn): ...

Language = Literal["language", "wikitext2_lab", "wikitext2_masked", "shakespeare_lab", "shakespeare", "shakespeare_nano"]
LanguageOwn = TypedDict("LanguageOwn", {
"bias": Any, "columns": Any, "context": Any, "family": Any, "feed_forward": Any, "gates": Any,
"header": Any, "kv_heads": Any, "label_smoothing": Any, "like": Any, "loss": Any,
"mask_share": Any, "objective": Any, "order": Any, "pieces": Any, "rung": Any, "template": Any,
"tokenizer": Any, "valid_tokens": Any
}, total=False)
class LanguageKeys(Given, Common, LanguageOwn): ...

Text = Literal["text", "text_many"]
TextOwn = TypedDict("TextOwn", {
"bpe_dropout": Any, "columns": Any, "feed_forward": Any, "from": Any, "header": Any,
"joined": Any, "kv_heads": Any, "label_smoothing": Any, "like": Any, "loss": Any,
"max_length": Any, "mean_span": Any, "metric": Any, "objective": Any, "order": Any,
"pieces": Any, "prefix": Any, "r_drop": Any, "share": Any, "skip_bad": Any, "source": Any,
"target": Any, "to": Any, "tokenizer": Any, "valid_sentences": Any, "vocabularies": Any
}, total=False)
class TextKeys(Given, Common, TextOwn): ...

Classify = Literal["classify", "trec", "trec_tuned", "sst2"]
ClassifyOwn = TypedDict("ClassifyOwn", {
"augment": Any, "background": Any, "batch": Any, "batch_rows": Any, "batch_seconds": Any,
"bpe_dropout": Any, "broken": Any, "buckets": Any, "channels": Any, "chunk": Any,
"class_weights": Any, "cluster_beam": Any, "clusters": Any, "columns": Any, "cutmix": Any,
"decoder_depth": Any, "depths": Any, "distil": Any, "distil_weight": Any, "drop_path": Any,
"encoding": Any, "erase": Any, "family": Any, "feature_dropout": Any, "feature_rows": Any,
"features": Any, "feed_forward": Any, "few": Any, "ffn_dropout": Any, "fit": Any,
"foreign": Any, "frequency_masks": Any, "frequency_share": Any, "frequency_warp": Any,
"head_dropout": Any, "header": Any, "hop": Any, "image": Any, "inner_width": Any, "kernel": Any,
"label_smoothing": Any, "labels": Any, "like": Any, "linear": Any, "loss": Any,
"max_length": Any, "mels": Any, "members": Any, "mixup": Any, "names": Any, "none": Any,
"normalise": Any, "order": Any, "padding": Any, "patch": Any, "pattern": Any, "pieces": Any,
"pool": Any, "r_drop": Any, "rate": Any, "separator": Any, "share": Any, "skip_bad": Any,
"sound": Any, "speeds": Any, "stem": Any, "strength": Any, "stride": Any, "subsampling": Any,
"teacher": Any, "temperature": Any, "threshold": Any, "tile": Any, "time_masks": Any,
"time_share": Any, "time_warp": Any, "tokenizer": Any, "valid_by": Any, "widths": Any,
"window": Any, "word_dropout": Any
}, total=False)
class ClassifyKeys(Given, Common, ClassifyOwn): ...

Images = Literal["images", "fashion", "cifar10"]
ImagesOwn = TypedDict("ImagesOwn", {
"augment": Any, "background": Any, "batch": Any, "broken": Any, "channels": Any,
"class_weights": Any, "columns": Any, "cutmix": Any, "depths": Any, "distil": Any,
"distil_weight": Any, "drop_path": Any, "erase": Any, "family": Any, "feed_forward": Any,
"fit": Any, "foreign": Any, "header": Any, "image": Any, "label_smoothing": Any, "like": Any,
"linear": Any, "loss": Any, "mixup": Any, "names": Any, "none": Any, "order": Any,
"padding": Any, "patch": Any, "pool": Any, "share": Any, "stem": Any, "strength": Any,
"teacher": Any, "temperature": Any, "tile": Any, "widths": Any, "window": Any
}, total=False)
class ImagesKeys(Given, Common, ImagesOwn): ...

Series = Literal["series", "japanese_vowels", "basic_motions"]
SeriesOwn = TypedDict("SeriesOwn", {
"augment": Any, "batch": Any, "chunk": Any, "class_weights": Any, "columns": Any,
"drop_path": Any, "family": Any, "feed_forward": Any, "head_dropout": Any, "header": Any,
"label_smoothing": Any, "linear": Any, "loss": Any, "max_length": Any, "members": Any,
"mixup": Any, "order": Any, "pool": Any, "strength": Any, "stride": Any
}, total=False)
class SeriesKeys(Given, Common, SeriesOwn): ...

Pretrain = Literal["pretrain", "cifar10_pretrain", "fashion_painter"]
PretrainOwn = TypedDict("PretrainOwn", {
"augment": Any, "background": Any, "batch": Any, "beta": Any, "broken": Any, "channels": Any,
"columns": Any, "decoder_depth": Any, "decoder_heads": Any, "decoder_width": Any, "depths": Any,
"drop_path": Any, "family": Any, "feed_forward": Any, "fit": Any, "header": Any, "image": Any,
"latent": Any, "least": Any, "like": Any, "mask_share": Any, "max_length": Any, "names": Any,
"objective": Any, "order": Any, "padding": Any, "patch": Any, "pieces": Any, "pool": Any,
"pretrainer": Any, "projection_width": Any, "share": Any, "stem": Any, "strength": Any,
"target": Any, "temperature": Any, "tile": Any, "widths": Any, "window": Any
}, total=False)
class PretrainKeys(Given, Common, PretrainOwn): ...

Caption = Literal["caption", "flickr8k_caption", "drawn_scenes"]
CaptionOwn = TypedDict("CaptionOwn", {
"attention": Any, "augment": Any, "background": Any, "batch": Any, "blind": Any, "broken": Any,
"captions": Any, "cell": Any, "cell_width": Any, "channels": Any, "columns": Any,
"decoder": Any, "decoder_depth": Any, "decoder_ffn_width": Any, "decoder_heads": Any,
"decoder_position": Any, "decoder_width": Any, "depths": Any, "doubly_stochastic": Any,
"drop_path": Any, "encoder_rate": Any, "family": Any, "feed_forward": Any, "fit": Any,
"header": Any, "image": Any, "label_smoothing": Any, "like": Any, "lowercase": Any,
"max_length": Any, "names": Any, "normalise": Any, "order": Any, "padding": Any, "patch": Any,
"pieces": Any, "pool": Any, "share": Any, "stem": Any, "strength": Any, "tile": Any,
"tokenizer": Any, "valid_images": Any, "widths": Any, "window": Any
}, total=False)
class CaptionKeys(Given, Common, CaptionOwn): ...

Segment = Literal["segment"]
SegmentOwn = TypedDict("SegmentOwn", {
"augment": Any, "background": Any, "batch": Any, "broken": Any, "channels": Any, "columns": Any,
"decoder": Any, "depths": Any, "drop_path": Any, "family": Any, "feed_forward": Any, "fit": Any,
"header": Any, "image": Any, "like": Any, "names": Any, "order": Any, "padding": Any,
"patch": Any, "pool": Any, "share": Any, "stem": Any, "strength": Any, "tile": Any,
"widths": Any, "window": Any
}, total=False)
class SegmentKeys(Given, Common, SegmentOwn): ...

Denoise = Literal["denoise", "denoise_train400"]
DenoiseOwn = TypedDict("DenoiseOwn", {
"batch": Any, "broken": Any, "every": Any, "image": Any, "look": Any, "loss": Any, "noise": Any,
"patch": Any, "score": Any, "window": Any
}, total=False)
class DenoiseKeys(Given, Common, DenoiseOwn): ...

Transcribe = Literal["transcribe", "an4"]
TranscribeOwn = TypedDict("TranscribeOwn", {
"augment": Any, "batch_seconds": Any, "broken": Any, "buckets": Any, "columns": Any,
"ctc_weight": Any, "decoder_depth": Any, "drop_path": Any, "family": Any, "features": Any,
"feed_forward": Any, "frequency_masks": Any, "frequency_share": Any, "frequency_warp": Any,
"header": Any, "hop": Any, "inter_ctc": Any, "kernel": Any, "label_smoothing": Any, "like": Any,
"mels": Any, "normalise": Any, "order": Any, "pieces": Any, "rate": Any, "sound": Any,
"speeds": Any, "subsampling": Any, "time_masks": Any, "time_share": Any, "time_warp": Any,
"tokenizer": Any, "valid_sounds": Any, "window": Any
}, total=False)
class TranscribeKeys(Given, Common, TranscribeOwn): ...

Sounds = Literal["sounds", "fsdd"]
SoundsOwn = TypedDict("SoundsOwn", {
"augment": Any, "batch_seconds": Any, "broken": Any, "buckets": Any, "class_weights": Any,
"columns": Any, "decoder_depth": Any, "drop_path": Any, "family": Any, "features": Any,
"feed_forward": Any, "foreign": Any, "frequency_masks": Any, "frequency_share": Any,
"frequency_warp": Any, "header": Any, "hop": Any, "kernel": Any, "label_smoothing": Any,
"like": Any, "linear": Any, "loss": Any, "mels": Any, "names": Any, "none": Any,
"normalise": Any, "order": Any, "pattern": Any, "pool": Any, "rate": Any, "sound": Any,
"speeds": Any, "subsampling": Any, "time_masks": Any, "time_share": Any, "time_warp": Any,
"window": Any
}, total=False)
class SoundsKeys(Given, Common, SoundsOwn): ...

Tag = Literal["tag", "ud_ewt_upos"]
TagOwn = TypedDict("TagOwn", {
"batch_rows": Any, "bpe_dropout": Any, "class_weights": Any, "column": Any, "columns": Any,
"encoding": Any, "family": Any, "feature_dropout": Any, "feature_rows": Any, "features": Any,
"feed_forward": Any, "ffn_dropout": Any, "head_dropout": Any, "inner_width": Any, "join": Any,
"label_smoothing": Any, "like": Any, "linear": Any, "loss": Any, "max_length": Any,
"members": Any, "order": Any, "pieces": Any, "pool": Any, "r_drop": Any, "skip_bad": Any,
"tokenizer": Any, "word_dropout": Any
}, total=False)
class TagKeys(Given, Common, TagOwn): ...
