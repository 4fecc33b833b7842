"""A trained captioner as its user has it: photos in, captions out, and where each word looked."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sacrebleu.metrics.chrf import CHRF
from torch import Tensor

from regard.attention.watch import watch
from regard.data.batches import pad
from regard.data.image import (
    BROKEN,
    ImageData,
    ImageFormat,
    ImageOptions,
    Images,
    load_images,
)
from regard.data.labelled import hash_items
from regard.decode import search
from regard.decode.search import Hypothesis
from regard.errors import UsageError, lookup
from regard.files import cache_folder
from regard.metrics.bleu import Comparison, Score, bleu_metric, compare
from regard.metrics.cider import SIGNATURE, cider
from regard.metrics.evaluation import Evaluation, made_here, write_outputs
from regard.metrics.interval import paired
from regard.metrics.score import compare_means
from regard.native import fast_run
from regard.settings import fill, setting
from regard.tasks.image_classifier import format_of, read_image
from regard.tasks.image_look import ImageLookSettings, check_kind, photo_of, picture_of
from regard.tasks.pretrain import captions_in, of_part
from regard.tasks.run import load_tokenizer
from regard.tasks.runners import Answer, Runner
from regard.tasks.translator import words_of_pieces
from regard.training.loss import vocabulary_loss

NAME = "caption"
LONGEST = 64  # pieces of a caption, unless told


@dataclass(frozen=True)
class CaptionRunSettings:
    """How to write captions."""

    beam: int = setting(5, "hypotheses followed; 1 is greedy", min=1, max=1000)
    length_penalty: str = setting("average", "average, gnmt or none")
    alpha: float | None = setting(None, "exponent of the length penalty", min=0, max=10)
    max_length: int = setting(LONGEST, "longest caption in pieces", min=1, max=10_000)
    n_best: int = setting(1, "captions a photo", min=1, max=1000)
    scores: bool = setting(False, "tell the score of each caption")
    prefix: str = setting("", "how every caption begins")
    temperature: float | None = setting(None, "draw at random, at this temperature", min=0, max=100)
    top_k: int | None = setting(None, "draw among so many", min=1)
    top_p: float | None = setting(None, "draw among the likeliest with this mass", min=0, max=1)
    min_p: float | None = setting(None, "draw above this share of the likeliest", min=0, max=1)
    seed: int = setting(1, "of the draws", min=0)
    image: int | None = setting(None, "pixels that images are brought to", min=1, max=4096)
    broken: str = setting("refuse", "a file that cannot be read: refuse it or skip it")
    batch: int = setting(64, "images read at once", min=1, max=100_000)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)

    @property
    def draws(self) -> bool:
        """Tell whether captions are drawn at random."""
        return any(x is not None for x in (self.temperature, self.top_k, self.top_p, self.min_p))


@dataclass(frozen=True)
class CaptionEvalSettings(CaptionRunSettings):
    """What to judge captions on, and how."""

    data: str | None = setting(None, "a folder or table of images and captions")
    part: str = setting("test", "test, valid or train")
    test: str | None = setting(None, "which test set of the folder")
    valid: str | None = setting(None, "which set to choose by, or a share")
    columns: str | None = setting(None, "path and caption, such as 2,1")
    header: bool | None = setting(None, "whether a table begins with one; recognised unless told")
    tokenise: str | None = setting(None, "sacreBLEU's tokenisation")
    lowercase: bool = setting(True, "ignore case")
    shuffle: bool = setting(False, "also the loss of captions beside another's image")
    samples: int = setting(1000, "of the bootstrap", min=100, max=100_000)
    outputs: str | None = setting(None, "a file for the answers; .jsonl tells more")


@dataclass(frozen=True)
class CaptionLookSettings(ImageLookSettings):
    """What to see of how a caption came about."""

    view: str = setting("words", "words (where each looked), attention, rollout or filters")
    candidates: int = setting(5, "tokens to tell for each step", min=1, max=1000)
    beam: int = setting(5, "hypotheses followed; 1 is greedy", min=1, max=1000)
    caption: str | None = setting(None, "a caption to look for, instead of its own")


@dataclass
class Caption(Answer):
    """A caption, with what is known about it; `others` are the next best."""

    text: str
    score: float = 0.0
    others: list["Caption"] = field(default_factory=list)
    error: str = ""  # why there is none

    def __str__(self) -> str:
        return self.text

    def lines(self, how: CaptionRunSettings) -> Iterator[str]:
        """Write the captions as lines, each with its score after ` ||| ` if asked for."""
        for one in [self, *self.others] if not self.error else [self] * how.n_best:
            yield f"{one.text} ||| {one.score:.6f}" if how.scores and not one.error else one.text

    def record(self, how: CaptionRunSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        if self.error:
            return {"prediction": None, "error": self.error}
        found: dict[str, Any] = {"prediction": self.text, "score": round(self.score, 6)}
        if self.others:
            found["n_best"] = [found.copy(), *(other.record(how) for other in self.others)]
        return found


def tidy(text: str, lowercase: bool) -> str:
    """Return a caption as it is learnt: single spaces, and small letters if told."""
    text = " ".join(text.split())
    return text.lower() if lowercase else text


def references_of(captions: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Lay the captions of each image out as sacreBLEU wants them: first ones, second ones, ..."""
    most = max(map(len, captions))
    return [[some[n] if n < len(some) else None for some in captions] for n in range(most)]


class Describer(Runner[Caption]):
    """A model that captions images, with its tokenizer and the format of its images."""

    task = NAME
    reads = "image"  # the name of an input in JSON
    settings = CaptionRunSettings
    eval_settings = CaptionEvalSettings
    look_settings = CaptionLookSettings

    def __init__(self, model: Any, tokenizer: Any, format: ImageFormat, config: dict[str, Any]):
        self.model, self.tokenizer, self.format, self.config = model, tokenizer, format, config
        self.device = next(model.parameters()).device
        spare = range(tokenizer.vocab, model.head.out_features)
        # which no caption has
        self.forbidden = [tokenizer.pad, tokenizer.bos, tokenizer.unk, *spare]

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "Describer":
        """Put a loaded model together with the tokenizer beside it."""
        if not hasattr(model.config, "sight"):
            raise UsageError(
                f"{folder / 'config.json'}: a model of another family; expected captioner"
            )
        tokenizer = load_tokenizer(folder)
        if tokenizer.vocab > model.head.out_features:
            raise UsageError(
                f"{folder}: the tokenizer has {tokenizer.vocab} pieces, the model only "
                f"{model.head.out_features}"
            )
        made = cls(model, tokenizer, format_of(folder, model, config), config)
        try:
            made.check({})
        except UsageError as mistake:
            raise UsageError(f"{folder / 'generation_config.json'}: {mistake}") from None
        return made

    @property
    def lowercase(self) -> bool:
        """Tell whether captions are written in small letters."""
        return self.config.get("lowercase") is True

    # Writing

    def check(self, settings: Mapping[str, Any]) -> CaptionRunSettings:
        """Make full settings of what a user gave, with the model's own defaults."""
        return self._checked(fill(CaptionRunSettings, {**self._own(), **settings}))

    def _own(self) -> dict[str, Any]:
        return dict(self.config.get("generation", {}))

    def _checked(self, how: Any) -> Any:
        lookup("broken", how.broken, BROKEN)
        lookup("length_penalty", how.length_penalty, search.PENALTIES)
        if how.n_best > how.beam and not how.draws:
            raise UsageError(f"n_best={how.n_best} is more than beam={how.beam}; widen the beam")
        if how.max_length > self.model.config.max_length:
            raise UsageError(
                f"max_length={how.max_length} is more than the {self.model.config.max_length} "
                "pieces that the model was made for"
            )
        return how

    @fast_run
    def answer(self, inputs: list[Any], *, first: int = 0, **settings: Any) -> list[Caption]:
        """Caption images: paths, open images, or arrays (h, w, 3) of bytes."""
        how = self.check(settings)
        if how.threads:
            torch.set_num_threads(how.threads)
        format = replace(self.format, size=how.image or self.format.size)
        answers: list[Caption] = []
        for start in range(0, len(inputs), how.batch):
            some = inputs[start : start + how.batch]
            read = [read_image(image, format, how.broken) for image in some]
            pixels = [torch.from_numpy(x) for x in read if not isinstance(x, str)]
            lines = [first + start + n for n, x in enumerate(read) if not isinstance(x, str)]
            told = iter(self.describe(torch.stack(pixels), how, lines) if pixels else [])
            answers += [Caption("", error=x) if isinstance(x, str) else next(told) for x in read]
        return answers

    def describe(self, pixels: Tensor, how: CaptionRunSettings, lines: Sequence[int] = ()):
        """Return the captions of images, bytes (n, c, h, w); lines are their numbers for draws."""
        images = self.format.normalise(pixels.to(self.device))
        found = self.write(images, how, lines)
        return [self._told(some) for some in found]

    def write(
        self, images: Tensor, how: CaptionRunSettings, lines: Sequence[int] = ()
    ) -> list[list[Hypothesis]]:
        """Write captions of normalised images."""
        opening = self.tokenizer.encode(tidy(how.prefix, self.lowercase))
        rest: dict[str, Any] = {
            "length_penalty": how.length_penalty,
            "alpha": how.alpha,
            "max_length": max(how.max_length, len(opening)),
            "prefix": [opening] * len(images) if opening else None,
            "adjust": [search.forbid(*self.forbidden)],
            "bos": self.tokenizer.bos,
            "eos": self.tokenizer.eos,
        }
        if how.draws:
            return search.sample(
                self.model,
                images,
                samples=how.n_best,
                temperature=1.0 if how.temperature is None else how.temperature,
                top_k=how.top_k,
                top_p=how.top_p,
                min_p=how.min_p,
                seed=how.seed,
                lines=list(lines) or list(range(len(images))),
                **rest,
            )
        if how.beam == 1:
            return search.greedy(self.model, images, **rest)
        return search.beam(self.model, images, beam=how.beam, n_best=how.n_best, **rest)

    def _told(self, found: Sequence[Hypothesis]) -> Caption:
        answers = [Caption(self.tokenizer.decode(h.ids), h.score) for h in found]
        answers[0].others = answers[1:]
        return answers[0]

    @fast_run
    def captions_of(self, images: Images, how: CaptionRunSettings) -> list[str]:
        """Return the best caption of each image of a part."""
        places = np.arange(len(images))
        parts = [places[start : start + how.batch] for start in range(0, len(images), how.batch)]
        return [str(c) for p in parts for c in self.describe(images.read(p), how, p.tolist())]

    # Judging

    def encode(self, captions: Sequence[Sequence[str]], longest: int) -> list[list[np.ndarray]]:
        """Cut the captions of each image into pieces, at most so many."""
        texts = [tidy(text, self.lowercase) for some in captions for text in some]
        rows = iter(self.tokenizer.encode_batch(texts))
        return [[np.asarray(next(rows)[:longest], np.int64) for _ in some] for some in captions]

    @torch.inference_mode()
    def losses(
        self,
        images: Images,
        captions: Sequence[Sequence[np.ndarray]],
        *,
        seen: np.ndarray | None = None,
        batch: int = 64,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the summed loss of the captions of each image in nats, and their tokens.

        `seen` are the images to look at, if not each its own.
        """
        seen = np.arange(len(images)) if seen is None else seen
        losses, tokens = np.zeros(len(images)), np.zeros(len(images))
        for start in range(0, len(images), batch):
            some = range(start, min(len(images), start + batch))
            pixels = self.format.normalise(
                images.read(seen[some.start : some.stop]).to(self.device)
            )
            rows = framed([captions[i] for i in some], self.tokenizer, self.device)
            hidden = self.model.hidden(pixels, rows.reads)
            each = len(rows.reads) // len(some)
            for place, i in enumerate(some):
                mine = slice(place * each, (place + 1) * each)
                wanted = rows.writes[mine].flatten()
                found = hidden[mine].flatten(0, 1)[wanted >= 0]
                head = self.model.head
                loss = vocabulary_loss(found, head.weight, wanted[wanted >= 0], bias=head.bias)
                losses[i], tokens[i] = float(loss), int((wanted >= 0).sum())
        return losses, tokens

    def _data(self, how: CaptionEvalSettings) -> tuple[ImageData, list[list[str]]]:
        """Read the images of a part, as this model takes them, and their captions."""
        if how.data is None:
            raise UsageError(
                "data is missing; add data=FOLDER or data=TABLE of images and captions"
            )
        lookup("part", how.part, {"test": 0, "valid": 0, "train": 0})
        data = load_images(
            how.data,
            test=how.test,
            valid=how.valid,
            need=(how.part,),
            format=replace(self.format, size=how.image or self.format.size),
            options=ImageOptions(how.columns, broken=how.broken, labelled=False, header=how.header),
            cache=cache_folder(),
            trained=self.trained,
        )
        return data, told_of(data.parts[how.part], how)

    @fast_run
    def evaluate(
        self,
        settings: dict[str, Any],
        *,
        against: "Describer | None" = None,
        names: tuple[str, str] = ("model", ""),
    ) -> Evaluation:
        """Caption a test set and judge the captions."""
        how: CaptionEvalSettings = self._checked(
            fill(CaptionEvalSettings, {**self._own(), **settings})
        )
        if against is not None and not isinstance(against, Describer):
            raise UsageError("against= names a model that writes no captions; compare captioners")
        if how.threads:
            torch.set_num_threads(how.threads)
        data, captions = self._data(how)
        images = data.parts[how.part]
        started = time.perf_counter()
        outputs = self.captions_of(images, how)
        seconds = time.perf_counter() - started
        scores = judge_captions(outputs, captions, how.tokenise, how.lowercase)
        scores += self._loss_scores(images, captions, how)
        comparison: list[Comparison] = []
        if against is not None:
            theirs = against.captions_of(against._data(how)[0].parts[how.part], how)
            comparison = compare_captions(outputs, theirs, captions, how)
        if how.outputs:
            rows = zip(range(len(images)), captions, outputs, strict=True)
            write_outputs(
                how.outputs,
                [{"image": images.where(i), "captions": c, "prediction": o} for i, c, o in rows],
            )
        made_with = {
            "data": how.data,
            "part": how.part,
            "data_hash": hash_items(list(zip(images.hashes, captions, strict=True))),
            "tokenizers": [self.tokenizer.sha],
            **{name: getattr(how, name) for name in CaptionRunSettings.__dataclass_fields__},
            **made_here(),
        }
        return Evaluation(
            names[0],
            scores,
            len(images),
            seconds,
            made_with,
            names[1] or None,
            comparison,
            "images",
            notes=data.notes,
        )

    def _loss_scores(
        self, images: Images, captions: list[list[str]], how: CaptionEvalSettings
    ) -> list[Score]:
        """Return the loss a token, and with shuffle= that beside another's image."""
        rows = self.encode(captions, self.model.config.max_length - 1)
        mine, tokens = self.losses(images, rows, batch=how.batch)
        count = f"captions:{sum(map(len, captions))}|tokens:{int(tokens.sum())}"
        scores = [Score("loss", mine.sum() / tokens.sum(), f"nats a token|{count}", 4)]
        if how.shuffle:
            if len(images) < 2:
                raise UsageError("shuffle=true needs two images or more to exchange")
            other = strangers(len(images), how.seed)
            theirs, _ = self.losses(images, rows, seen=other, batch=how.batch)
            known = paired((theirs / tokens).tolist(), (mine / tokens).tolist())
            assert known is not None
            sure = f"95%: {known.mean - known.half:.4f} to {known.mean + known.half:.4f} an image"
            scores += [
                Score("loss, another's image", theirs.sum() / tokens.sum(), count, 4),
                Score(
                    "what its own image is worth",
                    (theirs.sum() - mine.sum()) / tokens.sum(),
                    f"nats a token|seed:{how.seed}|{sure}",
                    4,
                ),
            ]
        return scores

    # Looking

    def picture(self, image: Any, **settings: Any):
        """Caption an image and gather where each word looked, or how the image was seen."""
        how = fill(CaptionLookSettings, settings)
        writes = self.check({"beam": how.beam, "n_best": how.beam})
        if how.view != "words":
            return self._seen(image, how, writes)
        from regard.viewer.image import caption_views
        from regard.viewer.picture import Picture, Step

        if how.threads:
            torch.set_num_threads(how.threads)
        check_kind(image)
        format = replace(self.format, size=how.image or self.format.size)
        pixels, photo, name = photo_of(format, image)
        images = self.format.normalise(pixels.to(self.device))
        found = self.write(images, writes)[0] if how.caption is None else []
        ids = (
            found[0].ids if found else self.tokenizer.encode(tidy(str(how.caption), self.lowercase))
        )
        if not ids or len(ids) >= self.model.config.max_length:
            raise UsageError(f"a caption of {len(ids)} pieces; there is nothing to look at")
        maps, logits = self.maps(images, ids)
        pieces = self.tokenizer.pieces(ids)
        words, of = words_of_pieces(pieces)
        size = (images.shape[2], images.shape[3])
        views = caption_views(self.model.encoder, maps, size, words, of)
        chances = logits.float().softmax(-1)
        top = chances.topk(min(how.candidates, chances.shape[-1]))
        show, steps = self.tokenizer.pieces, []
        for i, number in enumerate([*ids, self.tokenizer.eos]):
            pairs = zip(show(top.indices[i].tolist()), top.values[i].tolist(), strict=True)
            steps.append(Step(show([number])[0], float(chances[i, number]), list(pairs)))
        told = [(self.tokenizer.decode(h.ids), h.score) for h in found[1:]]
        return Picture(
            title=name,
            views=views,
            steps=steps,
            source=name,
            output=self.tokenizer.decode(ids),
            alternatives=told,
            note=f"beam {how.beam}" if found else "a caption that was given",
            opens=(views[-1].name, "mean"),
            photo=photo,
            query="mean",
        )

    def _seen(self, image: Any, how: CaptionLookSettings, writes: CaptionRunSettings):
        """Gather how the encoder looked at an image."""

        def answer(pixels: Tensor) -> dict[str, Any]:
            caption = self.describe(pixels, writes)[0]
            others = [(other.text, other.score) for other in caption.others]
            return {"output": caption.text, "alternatives": others}

        return picture_of(self.model.encoder, self.format, image, how, answer)

    @torch.inference_mode()
    def maps(self, images: Tensor, ids: Sequence[int]):
        """Return the attention over one image while a caption is written, exactly, and logits."""
        reads = torch.tensor([[self.tokenizer.bos, *ids]], device=self.device)
        with watch(self.model) as maps:
            logits = self.model(images, reads)
        return maps, logits[0]


def told_of(images: Images, how: CaptionEvalSettings) -> list[list[str]]:
    """Return the captions of each image of a part, wherever the data have them."""
    data = Path(str(how.data))
    home = data if data.is_dir() else data.parent
    found: dict[str, list[str]] = {}
    for part in ("train", "valid", "test") if data.is_dir() else ("train",):
        found |= captions_in(data, part, how.columns, how.header)
    for given in (how.valid, how.test):
        for path in [Path(given), home / given] if given else []:
            if path.is_file():
                found |= captions_in(path, "", how.columns, how.header)
    told = of_part(images, found)
    if not any(map(any, told)):
        raise UsageError(
            f"{data}: no captions of these images; expected a TSV of paths and captions, or a "
            "folder with test.tsv"
        )
    return told


@dataclass
class Framed:
    """Captions (n, t) shifted for reading and for guessing, as many of each image; -1 is none."""

    reads: Tensor
    writes: Tensor


def framed(captions: Sequence[Sequence[np.ndarray]], tokenizer: Any, device: Any) -> Framed:
    """Put captions of images side by side, with their begin and end; missing ones are empty."""
    most = max(map(len, captions))
    nothing = np.zeros(0, np.int64)
    rows = [some[n] if n < len(some) else None for some in captions for n in range(most)]
    real = [nothing if row is None else row for row in rows]
    reads, _ = pad([np.concatenate([[tokenizer.bos], row]) for row in real], tokenizer.pad)
    writes, _ = pad([nothing if row is None else np.append(row, tokenizer.eos) for row in rows], -1)
    return Framed(reads.to(device), writes.to(device))


def strangers(count: int, seed: int) -> np.ndarray:
    """Return for each of some things another one, all of them once: nobody keeps its own."""
    order = np.random.Generator(np.random.PCG64([seed, count])).permutation(count)
    found = np.empty(count, np.int64)
    found[order] = np.roll(order, 1)
    return found


def judge_captions(
    outputs: Sequence[str],
    captions: Sequence[Sequence[str]],
    tokenise: str | None = None,
    lowercase: bool = True,
) -> list[Score]:
    """Return BLEU of runs of up to 1, 2, 3 and 4 words, chrF and CIDEr-D."""
    told: Any = references_of(captions)
    metrics: dict[str, Any] = {
        f"BLEU-{order}": bleu_metric("en", tokenise, lowercase, order, force=True)
        for order in range(1, 5)
    }
    metrics["chrF2"] = CHRF(lowercase=lowercase)
    scores = [
        Score(name, metric.corpus_score(list(outputs), told).score, str(metric.get_signature()))
        for name, metric in metrics.items()
    ]
    signature = f"nrefs:{len(told)}|{SIGNATURE}"
    return [*scores, Score("CIDEr-D", float(cider(outputs, captions).mean()), signature)]


def compare_captions(
    ours: Sequence[str],
    theirs: Sequence[str],
    captions: Sequence[Sequence[str]],
    how: CaptionEvalSettings,
) -> list[Comparison]:
    """Compare two systems by paired bootstrap resampling (Koehn 2004)."""
    told: Any = references_of(captions)
    options: dict[str, Any] = {"tokenise": how.tokenise, "lowercase": how.lowercase}
    found = compare(ours, theirs, told, "en", samples=how.samples, **options)
    found = [replace(one, name="BLEU-4") if one.name == "BLEU" else one for one in found]
    mine, other = ({"CIDEr-D": cider(outputs, captions)} for outputs in (ours, theirs))
    more = f"nrefs:{len(told)}|{SIGNATURE}"
    return found + compare_means(mine, other, how.samples, more, "images")
