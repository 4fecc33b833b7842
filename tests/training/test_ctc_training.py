"""Intermediate CTC, where the middle block learns to write, too."""

import numpy as np
import pytest
import torch

import regard
from regard.data.characters import Characters
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.models.conformer import Conformer, ConformerConfig
from regard.tasks.sound.transcribing import make_batch, speech_loss


def model_and_batch():
    torch.manual_seed(0)
    tokenizer = Characters.learn(["ABC CAB"])
    block = BlockConfig(16, 2, 32, feed_forward="swish")
    config = ConformerConfig(
        mels=8, vocab=tokenizer.vocab, channels=4, depth=4, block=block, kernel=3
    )
    rows = [np.array(tokenizer.encode(text), dtype=np.int64) for text in ("ABC", "CAB A")]
    batch = make_batch(rows, torch.randn(2, 60, 8), torch.tensor([41, 60]), 101, tokenizer)
    return Conformer(config).eval(), batch


def test_the_memory_after_some_blocks_is_that_of_a_model_of_so_many():
    model, batch = model_and_batch()
    with torch.no_grad():
        (middle, last), lengths = model.encode_at(batch.sound, batch.lengths, [2, 4])
        whole, same = model.encode(batch.sound, batch.lengths)
        del model.encoder[2:]
        shorter, _ = model.encode(batch.sound, batch.lengths)
    assert last.equal(whole) and middle.equal(shorter) and lengths.equal(same)
    assert not middle.equal(last) and middle[0, int(lengths[0]) :].abs().max() == 0


def test_the_middle_has_its_share_of_the_loss_and_a_gradient():
    model, batch = model_and_batch()
    share = 0.3
    both = speech_loss(model, batch, 1.0, 0.0, share)
    whole = speech_loss(model, batch, 1.0, 0.0)
    layers, model.encoder = model.encoder, model.encoder[:2]
    half = speech_loss(model, batch, 1.0, 0.0)
    model.encoder = layers
    torch.testing.assert_close(both, share * half + (1 - share) * whole)
    assert whole.item() != half.item()
    both.backward()
    assert all(p.grad is not None for p in model.encoder[3].parameters() if p.requires_grad)


def test_a_share_of_no_ctc_is_refused():
    with pytest.raises(UsageError, match="inter_ctc=0.3 is a share"):
        changed = {"inter_ctc": 0.3, "ctc_weight": 0, "decoder_depth": 1}
        regard.train("transcribe", data="sounds.tsv", steps=1, **changed)
