"""Intermediate CTC, where the middle block learns to write, too; and the consistency of copies."""

import numpy as np
import pytest
import torch

import regard
from regard.data.augment import step_rng
from regard.data.characters import Characters
from regard.data.sound_augment import SoundAugment
from regard.data.spectrogram import SoundFormat
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.models.conformer import Conformer, ConformerConfig
from regard.tasks.sound.transcribing import make_batch, speech_loss
from regard.training.ctc_loss import consistency_loss


def model_and_batch():
    torch.manual_seed(0)
    tokenizer = Characters.learn(["ABC CAB"])
    block = BlockConfig(16, 2, 32, feed_forward="swish")
    config = ConformerConfig(
        mels=8, vocab=tokenizer.vocab, channels=4, depth=4, block=block, kernel=3
    )
    rows = [np.array(tokenizer.encode(text), dtype=np.int64) for text in ("ABC", "CAB A")]
    batch = make_batch(rows, torch.randn(2, 60, 8), torch.tensor([41, 60]), tokenizer)
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


@pytest.mark.parametrize("key", ["inter_ctc", "consistency"])
def test_a_share_of_no_ctc_is_refused(key):
    with pytest.raises(UsageError, match=f"{key}=0.3 is a share"):
        changed = {key: 0.3, "ctc_weight": 0, "decoder_depth": 1}
        regard.train("transcribe", data="sounds.tsv", steps=1, **changed)


def test_copies_of_a_sound_differ_in_masks_only_and_the_first_is_that_without_copies():
    samples, format = np.random.default_rng(0).standard_normal(16000), SoundFormat(mels=16)
    augment = SoundAugment(speeds=(0.9, 1.1), time_warp=5, frequency_warp=0.1)
    first, second = augment.copies(samples, format, step_rng(1, 2, 3), 2)
    assert first.equal(augment(samples, format, step_rng(1, 2, 3)))
    assert first.shape == second.shape and not first.equal(second)
    unmasked = SoundAugment(speeds=(0.9, 1.1), time_warp=5, time_masks=0, frequency_masks=0)
    first, second = unmasked.copies(samples, format, step_rng(1, 2, 3), 2)
    assert first.equal(second)


def test_consistency_is_the_divergence_of_each_copy_from_the_other_and_reads_no_padding():
    torch.manual_seed(0)
    logits, lengths = torch.randn(4, 5, 3, dtype=torch.float64), torch.tensor([5, 2, 5, 2])
    p = logits.softmax(-1)
    expected = 0.0
    for one, other in ((0, 2), (2, 0), (1, 3), (3, 1)):
        for t in range(int(lengths[one])):
            ratio = p[other, t].log() - p[one, t].log()
            expected += float((p[other, t] * ratio).sum())
    found = consistency_loss(logits.requires_grad_(), lengths)
    torch.testing.assert_close(found.item(), expected)
    (gradient,) = torch.autograd.grad(found, logits)
    assert gradient[1, 2:].abs().max() == 0
    # the other copy is what to learn, and does not learn itself: p - q
    torch.testing.assert_close(gradient[0], p[0] - p[2])
    same = torch.randn(2, 5, 3).repeat(2, 1, 1)
    assert consistency_loss(same, lengths).item() == pytest.approx(0, abs=1e-6)


def test_consistency_is_added_to_the_loss_of_both_copies():
    model, batch = model_and_batch()
    twice = batch._replace(
        sound=torch.cat([batch.sound, batch.sound + 0.5 * torch.randn_like(batch.sound)]),
        lengths=batch.lengths.repeat(2),
        texts=batch.texts.repeat(2, 1),
        text_lengths=batch.text_lengths.repeat(2),
    )
    plain, more = (speech_loss(model, twice, 1.0, 0.0, 0.0, weight) for weight in (0.0, 0.2))
    memory, lengths = model.encode(twice.sound, twice.lengths)
    apart = consistency_loss(model.ctc_logits(memory), lengths)
    assert apart.item() > 0
    torch.testing.assert_close(more, plain + 0.2 * apart)
