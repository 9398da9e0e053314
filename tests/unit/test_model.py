"""The drafter against a plain reading of EAGLE-3: one row at a time, one dense mask, no tricks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.errors import RecipeError
from drafter.extraction.shards import Row
from drafter.target_head import TargetHead
from drafter.training.alignment import Batch, Span, align
from drafter.training.attention import attend, plain_block, plain_block_backward
from drafter.training.loss import Judge, soft_cross_entropy
from drafter.training.model import Drafter, Shape, new_drafter, rotate, shape_for

H, HEADS, KV, D, V, DRAFT = 32, 4, 2, 16, 50, 20
STEPS, DECAY = 3, 0.8


def head(seed: int = 0) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    embed, norm, lm_head = (
        torch.randn(*size, generator=generator) for size in ((V, H), (H,), (V, H))
    )
    return TargetHead(embed, 1 + 0.1 * norm, 1e-6, lm_head / H**0.5)


def drafter(seed: int = 0) -> Drafter:
    shape = Shape(
        hidden_size=H, intermediate_size=48, num_heads=HEADS, num_kv_heads=KV, head_dim=D,
        norm_eps=1e-6, rope_theta=10_000.0, max_positions=512, vocab_size=V,
        draft_vocab_size=DRAFT, aux_layers=(1, 2, 3),
    )  # fmt: skip
    chosen = torch.arange(0, 2 * DRAFT, 2)
    t2d = torch.zeros(V, dtype=torch.bool).index_fill(0, chosen, True)
    made = new_drafter(shape, head(), chosen - torch.arange(DRAFT), t2d, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made


def row(tokens: int, prompt: int, seed: int) -> Row:
    generator = torch.Generator().manual_seed(seed)
    return Row(
        sample_id=f"row-{seed}",
        input_ids_T=torch.randint(0, V, (tokens,), generator=generator),
        prompt_tokens=prompt,
        aux_TAD=torch.randn(tokens, 3, H, generator=generator),
        final_TD=torch.randn(tokens, H, generator=generator),
    )


ROWS = [row(23, 9, 1), row(12, 1, 2), row(7, 5, 3), row(40, 20, 4)]


def plain_losses(model: Drafter, target: TargetHead, rows: list[Row]) -> list[Tensor]:
    """Mean loss of each step by the definition, every slot of every row in every step."""
    layer, chosen = model.midlayer, model.draft_ids
    sums, counts = [torch.tensor(0.0)] * STEPS, [0] * STEPS
    for each in rows:
        x, n = each.input_ids_T, len(each.input_ids_T)
        slots = torch.arange(n - 1)
        h = model.fc(each.aux_TAD[:-1].flatten(1))
        wanted = target.logits(each.final_TD)[:, chosen].softmax(-1)
        keys, values = [], []
        for step in range(STEPS):
            ids = x[(slots + 1 + step).clamp(max=n - 1)]
            z = torch.cat([layer.input_layernorm(model.embed[ids]), layer.hidden_norm(h)], -1)
            attention = layer.self_attn
            q, k, v = (
                projection(z).view(n - 1, -1, D)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q = rotate(q, slots + step, 10_000.0)
            keys.append(rotate(k, slots + step, 10_000.0))
            values.append(v)
            allowed = torch.cat(
                [torch.ones(n - 1, n - 1).tril()] + [torch.eye(n - 1)] * step, 1
            ).bool()
            k, v = (torch.cat(y).repeat_interleave(HEADS // KV, 1) for y in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(D)
            shares = scores.masked_fill(~allowed, -math.inf).softmax(-1)
            h = h + attention.o_proj(torch.einsum("hqk,khd->qhd", shares, v).flatten(1))
            m, mlp = layer.post_attention_layernorm(h), layer.mlp
            h = h + mlp.down_proj(F.silu(mlp.gate_proj(m)) * mlp.up_proj(m))
            drawn = model.logits(h).log_softmax(-1)
            for slot in range(each.prompt_tokens - 1, n - 2 - step):
                sums[step] = sums[step] - (wanted[slot + 1 + step] * drawn[slot]).sum()
                counts[step] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)]


def our_losses(model: Drafter, target: TargetHead, batch: Batch):
    states = model.train_states(batch, STEPS)
    judge = Judge(target.normed(batch.final_QH), target.lm_head[model.draft_ids], batch.left_Q)
    return soft_cross_entropy(states, model.lm_head.weight, judge, DECAY)


def test_every_step_and_every_gradient_equals_the_dense_mask_reference():
    model, target = drafter(), head()
    expected = plain_losses(model, target, ROWS)
    total = sum(DECAY**i * loss for i, loss in enumerate(expected))
    wanted = torch.autograd.grad(total, list(model.parameters()))

    losses = our_losses(model, target, align(ROWS))
    found = torch.autograd.grad(losses.total, list(model.parameters()))

    torch.testing.assert_close(losses.mean, torch.stack(expected).detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(losses.total, total, atol=1e-5, rtol=1e-5)
    for name, one, other in zip(dict(model.named_parameters()), found, wanted, strict=True):
        torch.testing.assert_close(
            one, other, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_packed_rows_do_not_see_each_other():
    model = drafter()
    batch = align(ROWS)
    together = model.train_states(batch, STEPS)
    alone = [model.train_states(align([each]), STEPS) for each in ROWS]
    for step in range(STEPS):
        apart = torch.cat([states[step] for states in alone])
        judged = batch.left_Q > step
        torch.testing.assert_close(together[step][judged], apart[judged], atol=1e-5, rtol=1e-5)


def test_a_draft_that_follows_the_row_is_what_training_unrolls():
    model, batch = drafter(), align(ROWS)
    trained = model.train_states(batch, STEPS)
    unroll = model.unroll(batch)
    drafted = [unroll.first()]
    drafted += [unroll.next(batch.next_Q.roll(1 - step)) for step in range(1, STEPS)]
    for one, other in zip(trained, drafted, strict=True):
        torch.testing.assert_close(one, model.norm(other), atol=1e-5, rtol=1e-5)


def test_products_in_lower_precision_give_nearly_the_same_loss_and_gradients():
    model, target, batch = drafter(), head(), align(ROWS)
    parameters = [p for name, p in model.named_parameters() if p.dim() == 2]
    exact = our_losses(model, target, batch)
    wanted = torch.autograd.grad(exact.total, parameters)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = our_losses(model, target, batch)
    found = torch.autograd.grad(rounded.total, parameters)
    torch.testing.assert_close(rounded.mean, exact.mean, atol=0.05, rtol=0.02)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.1 * other.norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [5, 700])
def test_the_plain_kernel_computes_what_the_fused_one_does(causal: bool, length: int):
    generator = torch.Generator().manual_seed(0)
    q, grad = torch.randn(2, KV, 2, length, D, generator=generator).unbind(0)
    keys = length if causal else 9
    k, v = (x.expand(KV, 2, keys, D) for x in torch.randn(2, KV, 1, keys, D, generator=generator))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    out, lse = plain_block(q, k, v, causal)
    torch.testing.assert_close((out, lse), tuple(fused), atol=1e-5, rtol=1e-5)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    wanted = backward(grad, q, k, v, out, lse, 0.0, causal)
    found = plain_block_backward(grad, q, k, v, out, lse, causal)
    torch.testing.assert_close(found, tuple(wanted), atol=1e-4, rtol=1e-4)


def test_attention_gradients_are_right_in_double_precision():
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(*size, generator=generator, dtype=torch.float64)
        return drawn.requires_grad_()

    def attended(query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        spans = (Span(0, 1, 3, 0), Span(3, 3, 4, 2))
        return attend(query, key, value, [(own[0], own[1]), (own[2], own[3])], spans)

    own = [draw(3, 1, 2) for _ in range(4)]
    inputs = (draw(3, 1, 2, 2), draw(4, 1, 2), draw(4, 1, 2), *own)
    assert torch.autograd.gradcheck(attended, inputs)


def test_the_untrained_drafter_is_a_function_of_its_seed_and_starts_from_the_targets_head():
    one, same, other = drafter(0), drafter(0), drafter(1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert torch.equal(one.lm_head.weight, head().lm_head[one.draft_ids])


@pytest.mark.parametrize(
    ("config", "head_dim", "theta"),
    [
        pytest.param({"head_dim": 64, "rope_theta": 1e6}, 64, 1e6, id="explicit"),
        pytest.param({}, 16, 1e4, id="hidden over heads"),
        pytest.param({"v_head_dim": 128, "rope_theta": 5e4}, 128, 5e4, id="latent attention"),
        pytest.param({"rope_parameters": {"rope_theta": 7e3}}, 16, 7e3, id="rope_parameters"),
    ],
)
def test_the_shape_follows_the_target(config, head_dim, theta):
    base = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "vocab_size": 99,
    }  # fmt: skip
    shape = shape_for({**base, **config}, (2, 4, 5), 30, None)
    assert (shape.head_dim, shape.rope_theta, shape.intermediate_size) == (head_dim, theta, 128)
    assert shape_for({**base, **config}, (2, 4, 5), 30, 77).intermediate_size == 77


def test_a_target_without_a_needed_field_is_refused_by_name():
    with pytest.raises(RecipeError, match="num_attention_heads"):
        shape_for({"hidden_size": 64}, (1, 2, 3), 10, None)
