"""Training is what drafting is: the unrolled forward against single passes, the loss against autograd."""

import pytest
import torch

from microspec_hf.eagle import EagleConfig, EagleHead
from microspec_hf.hf import TargetHead, TreeCache, additive_mask
from microspec_hf.training.data import Batch
from microspec_hf.training.loss import UnrolledHead, drafting_loss

H, V, R = 32, 53, 16


@pytest.fixture
def head():
    torch.manual_seed(0)
    return EagleHead(
        EagleConfig(hidden_size=H, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=V)
    ).double()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return Batch(
        hidden=torch.randn(2, R + 1, H, dtype=torch.float64),
        next_tokens=torch.randint(0, V, (2, R)),
        rows=torch.tensor([3, 4, 9, R + 2, R + 15]),
    )


def test_unrolled_steps_equal_incremental_drafting(head, batch):
    """Step s at row j: true features up to j - s + 1 in the cache, then the head's own, one row at a time."""
    embeddings = torch.nn.Embedding(V, H).double()
    outputs = UnrolledHead(head, embeddings, unroll=4)(batch, noise=0.0)
    for sequence in range(2):
        embedded = embeddings(batch.next_tokens[sequence])
        for first in (4, 9):  # the last row of true features
            cache = TreeCache(1)
            output = _run(head, cache, embedded[: first + 1], batch.hidden[sequence, : first + 1], 0)[-1:]
            torch.testing.assert_close(output[0], outputs[0][sequence, first])
            for step in range(1, 4):
                row = first + step
                output = _run(head, cache, embedded[row : row + 1], output, row)
                torch.testing.assert_close(output[0], outputs[step][sequence, row])


def _run(head, cache, embedded, hidden, start):
    positions = torch.arange(start, start + len(hidden))
    columns = torch.arange(start + len(hidden))
    cache.prepare(positions[None], len(columns))
    mask = additive_mask(torch.where(columns <= positions[:, None], 0, -1), positions, None, torch.float64)
    return head(embedded[None], hidden[None], positions[None], mask, cache)[0]


def test_padding_after_a_sequence_changes_nothing_before_it(head, batch):
    embeddings = torch.nn.Embedding(V, H).double()
    model = UnrolledHead(head, embeddings, unroll=3)
    changed = Batch(batch.hidden.clone(), batch.next_tokens.clone(), batch.rows)
    changed.hidden[:, 10:] = 7.0
    changed.next_tokens[:, 10:] = 1
    for a, b in zip(model(batch, 0.0), model(changed, 0.0), strict=True):
        torch.testing.assert_close(a[:, :10], b[:, :10])


@pytest.mark.parametrize(("scale", "softcap", "has_bias"), [(1.0, None, False), (0.7, None, True), (1.5, 4.0, True)])
def test_loss_and_gradient_equal_plain_autograd(batch, monkeypatch, scale, softcap, has_bias):
    monkeypatch.setattr("microspec_hf.training.loss.CHUNK", 2)  # several chunks for five rows
    weight = torch.randn(V, H)
    lm_head = TargetHead(torch.nn.Identity(), weight, torch.randn(V) if has_bias else None, scale, softcap)

    def logits_of(rows):
        return lm_head.project(rows, weight, lm_head.bias)

    students = [torch.randn(2, R, H, requires_grad=True) for _ in range(3)]
    batch = Batch(batch.hidden.float(), batch.next_tokens, batch.rows)
    loss, entropy, agreement = drafting_loss(students, batch, lm_head, 0.8, 0.1)
    got = torch.autograd.grad(loss, students)

    teacher = batch.hidden[:, 1:].reshape(-1, H)[batch.rows]
    target = logits_of(teacher).softmax(-1)
    wanted = torch.zeros(())
    for step, student in enumerate(students):
        rows = student.reshape(-1, H)[batch.rows]
        logits = logits_of(rows)
        cross = -(target * logits.log_softmax(-1)).sum(-1).mean()
        torch.testing.assert_close(entropy[step], cross.detach())
        torch.testing.assert_close(agreement[step], (logits.argmax(-1) == target.argmax(-1)).float().mean())
        wanted = wanted + 0.8**step * (cross + 0.1 * torch.nn.functional.smooth_l1_loss(rows, teacher))
    torch.testing.assert_close(loss, wanted)
    for a, b in zip(got, torch.autograd.grad(wanted, students), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
