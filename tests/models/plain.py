"""Models as users write them, each with what a capture can trip over; `build_*` return (model, batch[, loss_fn])."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class ConvUNet(nn.Module):
    """Convolutions, batch norm, in-place activations, skips, upsampling."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.down1 = self._block(3, width)
        self.down2 = self._block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = self._block(2 * width, width)
        self.head = nn.Conv2d(width, 5, 1)

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True))

    def forward(self, image: Tensor) -> Tensor:
        first = self.down1(image)
        second = self.down2(F.max_pool2d(first, 2))
        return self.head(self.merge(torch.cat([first, self.up(second)], dim=1)))


def build_unet() -> tuple[nn.Module, Any, Any]:
    batch = (torch.randn(2, 3, 12, 8), torch.randint(0, 5, (2, 12, 8)))
    return _FirstOnly(ConvUNet()), batch, lambda output, batch: F.cross_entropy(output, batch[1])


class _FirstOnly(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        del target
        return self.inner(image)


class Recurrent(nn.Module):
    """An LSTM, packed with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 10, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 23)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden, _ = self.lstm(self.embed(tokens))
        logits = self.head(hidden)
        return {"logits": logits, "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())}


def build_lstm() -> tuple[nn.Module, Any]:
    return Recurrent(), {"tokens": torch.randint(0, 23, (3, 7))}


class EinsumMixer(nn.Module):
    """Own parameters used through einsum, `@`, `.T` and bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(5, 5) * 0.3)
        self.inner = nn.Parameter(torch.randn(8, 16) * 0.3)
        self.outer = nn.Parameter(torch.randn(8, 16) * 0.3)
        self.heads = nn.Parameter(torch.randn(2, 4, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.einsum("bsd,st->btd", x, self.token)
        x = F.gelu(x @ self.inner) @ self.outer.T
        batch, seq, _ = x.shape
        parts = x.view(batch * seq, 2, 4).transpose(0, 1)
        x = torch.bmm(parts, self.heads).transpose(0, 1).reshape(batch, seq, 8)
        return (x**2).mean()


def build_einsum() -> tuple[nn.Module, Any]:
    return EinsumMixer(), (torch.randn(3, 5, 8),)


class TiedFrozen(nn.Module):
    """Tied embeddings, a frozen layer, a module called twice, a buffer averaged under no_grad, a nested batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("average", torch.zeros(8))
        self.scale = torch.tensor([0.5])

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, rate: float = 0.9) -> dict[str, Any]:
        hidden = self.embed(inputs["ids"]) * inputs["weight"].unsqueeze(-1) * self.scale
        hidden = self.twice(torch.tanh(self.twice(self.frozen(hidden))))
        with torch.no_grad():
            self.average.mul_(rate).add_(hidden.mean((0, 1)), alpha=1 - rate)
            centre = hidden.mean(-1, keepdim=True)
        logits = self.head(hidden - centre)
        losses = {"main": F.cross_entropy(logits.transpose(1, 2), labels), "size": hidden.pow(2).mean()}
        return {"loss": losses["main"] + 0.1 * losses["size"], "losses": losses, "logits": logits, "rate": rate}


def build_tied() -> tuple[nn.Module, Any]:
    inputs = {"ids": torch.randint(0, 19, (3, 5)), "weight": torch.rand(3, 5)}
    return TiedFrozen(), {"inputs": inputs, "labels": torch.randint(0, 19, (3, 5)), "rate": 0.8}


@dataclass
class Answer:
    """A plain dataclass, unknown to torch, as an output."""

    loss: Tensor
    hidden: Tensor


class Autocast(nn.Module):
    """Mixed precision inside forward, with an island of full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Answer:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.norm(F.gelu(self.first(x)))
            with torch.autocast("cpu", enabled=False):
                hidden = hidden.float() * hidden.float().pow(2).mean(-1, keepdim=True).rsqrt()
            out = torch.einsum("bi,bj->bij", self.second(hidden), self.second(hidden + 1))
        return Answer(F.mse_loss(out.float().sum(-1), y), hidden)


def build_autocast() -> tuple[nn.Module, Any]:
    return Autocast(), {"x": torch.randn(6, 8), "y": torch.randn(6, 4)}


class InPlace(nn.Module):
    """Writes through views: slices, selects, chunks, transposes, masks; some read before, some after."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).clone()
        early = h[:, 2:].sum()
        h[:, 0] = h[:, 1] * 2
        h[:, 2:4].mul_(0.5).add_(1)
        left, right = h[..., :3], h[..., 3:]
        left += right
        flipped = h.transpose(1, 2)
        flipped[:, 1:, -1] = 3.0
        h.view(-1)[0:2] = 0.25
        h.masked_fill_(h > 1.5, 0.75)
        whole = torch.zeros_like(h)
        whole[..., 1:] = h[..., :-1]
        whole[:, [0, 2]] += 1
        whole.diagonal(dim1=1, dim2=2).mul_(-1)
        out = F.relu_(whole - 0.2)
        return (out * flipped.transpose(1, 2)).sum() + early + left.sum() * 0.1


def build_inplace() -> tuple[nn.Module, Any]:
    return InPlace(), (torch.randn(2, 6, 6),)


class NanoGPT(nn.Module):
    """Attention written out, with a buffer for the mask; weights tied; as in the small teaching codes."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.wte = nn.Embedding(29, 12)
        self.wpe = nn.Embedding(16, 12)
        self.qkv = nn.Linear(12, 36)
        self.proj = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 29, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        batch, seq = ids.size()
        x = self.wte(ids) + self.wpe(torch.arange(0, seq, device=ids.device))
        q, k, v = self.qkv(self.norm(x)).split(12, dim=2)
        q, k, v = (part.view(batch, seq, 3, 4).transpose(1, 2) for part in (q, k, v))
        shown = self.mask[:, :, :seq, :seq] == 1
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=shown)
        else:
            scores = (q @ k.transpose(-2, -1)) * 0.5
            mixed = F.softmax(scores.masked_fill(~shown, float("-inf")), dim=-1) @ v
        x = x + self.proj(mixed.transpose(1, 2).contiguous().view(batch, seq, 12))
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, 29), targets.view(-1), ignore_index=-1)


def build_nano(fused: bool = True, batch_size: int = 3, seq_len: int = 10) -> tuple[nn.Module, Any, Any]:
    shape = (batch_size, seq_len)
    batch = {"ids": torch.randint(0, 29, shape), "targets": torch.randint(0, 29, shape)}
    return NanoGPT(fused), batch, lambda output, batch: output[1]


class Moe(nn.Module):
    """Dense mixture: a top-k gate, all experts computed, one-hot weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 8)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        spread = torch.zeros(flat.size(0), 4).scatter(1, chosen, weight)
        outs = torch.stack([expert(flat) for expert in self.experts], dim=1)
        return (outs * spread.unsqueeze(-1)).sum(1).view_as(x).pow(2).mean()


def build_moe() -> tuple[nn.Module, Any]:
    return Moe(), (torch.randn(2, 5, 8),)


class Transformer(nn.Module):
    """torch's own encoder layers: fused projections, activation functions, dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        seq = x.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(seq)
        return self.head(self.encoder(x, mask=mask, is_causal=True)).square().mean()


def build_transformer() -> tuple[nn.Module, Any]:
    return Transformer(), (torch.randn(3, 6, 12),)


class Checkpointed(nn.Module):
    """Recomputes half of itself, in the way that torch recommends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(self._block, x, use_reentrant=False)
        return hidden.square().mean()

    def _block(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.first(x)))


def build_checkpointed() -> tuple[nn.Module, Any]:
    return Checkpointed(), (torch.randn(3, 6),)


class GroupNormNet(nn.Module):
    """Grouped and strided convolutions, group and instance norm, interpolation, adaptive pooling, weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3, stride=2, padding=1))
        self.depth = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.GroupNorm(2, 8)
        self.instance = nn.InstanceNorm1d(8, affine=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.instance(F.hardswish(self.norm(self.depth(self.stem(x)))))
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        return F.binary_cross_entropy_with_logits(self.out(h.mean(-1)), y)


def build_group() -> tuple[nn.Module, Any]:
    return GroupNormNet(), {"x": torch.randn(3, 4, 16), "y": torch.rand(3, 3)}


class Messages(nn.Module):
    """Sums over a graph's edges into a tensor made on the way, norms, a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.form = nn.Linear(16, 32), nn.Linear(32, 16), nn.Bilinear(16, 16, 4)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, y: Tensor) -> Tensor:
        h = self.there(x).relu()
        sums = torch.zeros(len(x), 32).index_add(0, target, h[source])
        h = self.back(sums / (1 + sums.norm(dim=-1, keepdim=True))).tanh()
        return F.cross_entropy(self.form(h, x), y)


def build_messages(**_: Any) -> tuple[nn.Module, Any]:
    edges = torch.randint(0, 20, (2, 50))
    return Messages(), {"x": torch.randn(20, 16), "source": edges[0], "target": edges[1], "y": torch.arange(20) % 4}


class Cells(nn.Module):
    """Recurrent cells, called step by step: LSTM, GRU and plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(6, 8), nn.GRUCell(8, 8, bias=False)
        self.plain, self.relu = nn.RNNCell(8, 8), nn.RNNCell(8, 8, nonlinearity="relu")
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = c = g = p = r = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            h, c = self.lstm(step, (h, c))
            g = self.gru(h, g)
            p = self.plain(g, p)
            r = self.relu(p, r)
        return F.cross_entropy(self.out(r + c), y)


def build_cells(**_: Any) -> tuple[nn.Module, Any]:
    return Cells(), {"x": torch.randn(5, 3, 6), "y": torch.arange(5) % 3}


class Losses(nn.Module):
    """Losses over labels of which some do not count, probabilities, rankings, rates; classes of unequal weight."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.classes = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(6, 4)
        self.register_buffer("of_class", torch.tensor([1.0, 2.0, 0.5, 1.5]))

    def forward(self, image: Tensor, x: Tensor, labels: Tensor, shares: Tensor, signs: Tensor) -> Tensor:
        maps, scores = self.pixels(image).log_softmax(1), self.classes(x)
        loss = F.nll_loss(maps, labels, self.of_class) + F.nll_loss(scores.log_softmax(-1), labels[:, 0, 0])
        loss = loss + F.nll_loss(maps, labels, reduction="none").square().mean()
        loss = (
            loss + F.cross_entropy(scores, shares) + F.cross_entropy(scores, shares, self.of_class, label_smoothing=0.1)
        )
        loss = loss + F.cross_entropy(maps, maps.detach().exp(), reduction="sum") / 50
        loss = (
            loss
            + F.margin_ranking_loss(scores[:, 0], scores[:, 1], signs)
            + F.hinge_embedding_loss(scores[:, 2], signs)
        )
        loss = loss + F.margin_ranking_loss(
            scores[:, :1], scores, signs[:, None]
        )  # over more entries than the first has
        temperature = scores.mean().softmax(0)
        return temperature * loss + F.poisson_nll_loss(scores, shares)


def build_losses(**_: Any) -> tuple[nn.Module, Any]:
    labels = torch.randint(0, 4, (5, 4, 4))
    labels[:3, 1:] = -100  # those that count are not alike over the samples
    signs = torch.randn(5).sign()
    shares = torch.randn(5, 4).softmax(-1)
    return Losses(), {
        "image": torch.randn(5, 3, 4, 4), "x": torch.randn(5, 6), "labels": labels, "shares": shares, "signs": signs
    }  # fmt: skip


class Graph(nn.Module):
    """Messages along edges, added up at their ends; a recurrence over time, by a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.gate, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        state = nodes
        for _ in range(2):
            added = torch.zeros_like(state).index_add(0, target, self.send(state)[source])
            keep = self.gate(state).sigmoid()
            state = keep * state + (1 - keep) * added.index_fill(0, source[:2], 0.5)
        return F.cross_entropy(self.out(state), labels)


def build_graph(**_: Any) -> tuple[nn.Module, Any]:
    source, target = torch.randint(0, 8, (2, 20))
    return Graph(), {"nodes": torch.randn(8, 6), "source": source, "target": target, "labels": torch.arange(8) % 4}


class Bags(nn.Module):
    """Tables of features with sums, means and largest entries of bags, as in recommendation; windows of a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(20, 6, mode=mode) for mode in ("sum", "mean", "max")])
        self.signal = nn.Linear(5, 6)
        self.top = nn.utils.parametrizations.weight_norm(nn.Linear(6, 1))

    def forward(self, ids: Tensor, signal: Tensor, clicked: Tensor) -> Tensor:
        found = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        found.append(self.signal(signal.unfold(1, 5, 2)).mean(1))
        stacked = torch.stack(found, 1)
        pairs = stacked @ stacked.transpose(1, 2)
        logits = self.top(stacked.sum(1)) + pairs.mean((1, 2))[:, None]
        return F.binary_cross_entropy_with_logits(logits[:, 0], clicked)


def build_bags(**_: Any) -> tuple[nn.Module, Any]:
    ids = torch.randint(0, 20, (8, 3, 4))
    return Bags(), {"ids": ids, "signal": torch.randn(8, 11), "clicked": torch.rand(8).round()}


class Inline(nn.Module):
    """Blocks that are dicts of layers, which one forward combines."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
            )
            for _ in range(3)
        )
        self.leave = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            q, k, v = block["qkv"](F.layer_norm(h, (8,))).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            h = h + block["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            h = h + block["down"](F.gelu(block["up"](F.layer_norm(h, (8,)))))
        return F.mse_loss(self.leave(h), y)


def build_inline(**_: Any) -> tuple[nn.Module, Any]:
    return Inline(), {"x": torch.randn(4, 6, 5), "y": torch.randn(4, 6, 5)}


class Spectral(nn.Module):
    """Complex numbers: transforms of real tensors, complex weights, and positions as rotations."""

    def __init__(self, size: int = 8, modes: int = 3) -> None:
        super().__init__()
        self.modes, self.inner = modes, nn.Linear(size, size)
        self.weight = nn.Parameter(torch.randn(size, size, modes, dtype=torch.cfloat) * 0.2)
        self.mixed, self.outer = nn.Linear(size, size), nn.Linear(size, 4)
        angles = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.5, 0.2, 0.1]))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.inner(x)
        pairs = torch.view_as_complex(hidden.unflatten(-1, (-1, 2)))
        hidden = torch.view_as_real(pairs * self.rotation).flatten(-2)
        spectrum = torch.fft.rfft(hidden, dim=1)
        kept = torch.einsum("bki,iok->bko", spectrum[:, : self.modes], self.weight)
        hidden = hidden + F.gelu(torch.fft.irfft(kept.conj(), n=x.shape[1], dim=1))
        hidden = hidden + torch.fft.fft2(self.mixed(hidden), dim=(1, 2)).real
        return ((self.outer(hidden) - target) ** 2).mean()


def build_spectral() -> tuple[nn.Module, Any]:
    return Spectral(), {"x": torch.randn(3, 6, 8), "target": torch.randn(3, 6, 4)}


class Modes(nn.Module):
    """Writes into spectra: a slice and an element of complex zeros, parts, and by pairs of real numbers of other strides."""

    def __init__(self, size: int = 8, modes: int = 3) -> None:
        super().__init__()
        self.modes, self.inner = modes, nn.Linear(size, size)
        self.weight = nn.Parameter(torch.randn(size, size, modes, 2) * 0.2)
        self.outer = nn.Linear(size, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.inner(x).transpose(1, 2)
        spectrum = torch.fft.rfft(hidden)
        out = torch.zeros_like(spectrum)
        weight = torch.view_as_complex(self.weight)
        out[:, :, : self.modes] = torch.einsum("bik,iok->bok", spectrum[:, :, : self.modes], weight)
        out[..., -1] = spectrum[..., 0].conj()
        out[:, 0].mul_(0.5)
        out.imag[:, 1] *= 2
        torch.view_as_real(out)[:, 2:, 0, 0] += 1
        pairs = hidden.contiguous().clone().unflatten(-1, (-1, 2))
        torch.view_as_complex(pairs)[:, :, 0] *= 1j
        halves = hidden.transpose(1, 2).unflatten(-1, (2, 4))
        whole, parts = torch.zeros(*x.shape[:2], 2, dtype=torch.cfloat), torch.zeros(*x.shape[:2], 2, 2)
        torch.view_as_real(whole).copy_(halves[..., 1:3])
        numbers = torch.view_as_complex(parts)
        parts.copy_(halves[..., :2].contiguous().mT)
        numbers[..., 0] *= 1j
        hidden = hidden + F.gelu(torch.fft.irfft(out, n=hidden.shape[-1])) + pairs.flatten(-2)
        return (
            ((self.outer(hidden.transpose(1, 2)) - target) ** 2).mean() + (whole * numbers).real.mean() + parts.mean()
        )


def build_modes() -> tuple[nn.Module, Any]:
    return Modes(), {"x": torch.randn(3, 6, 8), "target": torch.randn(3, 6, 4)}


class Timed(nn.Module):
    """Floats made of integers: timesteps as waves, without a float in the call that makes them."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.time, self.inner, self.outer = nn.Linear(2 * size, size), nn.Linear(4, size), nn.Linear(size, 4)
        self.size = size

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        waves = step[:, None] * torch.exp(-torch.arange(self.size) * 0.5)
        share = self.time(torch.cat([waves.sin(), waves.cos()], -1)).sigmoid()
        return (self.outer(torch.relu(self.inner(x)) * share) - x / (step[:, None] / 10 + 1)).square().mean()


def build_timed() -> tuple[nn.Module, Any]:
    return Timed(), {"x": torch.randn(4, 4), "step": torch.randint(0, 100, (4,))}


class Pairs(nn.Module):
    """Pairs of the batch's rows: differences, a matrix beside itself transposed, distances.

    Its weight lies transposed, and has the name of an entry of the batch.
    """

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(size, size), nn.Linear(size, 6)
        self.target = nn.Parameter(torch.randn(size, size).T / size**0.5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = torch.tanh(self.inner(x) @ self.target)
        near = torch.exp(-(rows[:, None] - rows[None]).square().sum(-1))
        scores = self.outer(rows)[:, : x.shape[0]]
        both = (scores + scores.T) * near + torch.cdist(rows, rows.flip(1))
        return F.mse_loss(both.amax(1) - both.gather(1, both.argmin(1, keepdim=True))[:, 0], target)


def build_pairs(**_: Any) -> tuple[nn.Module, Any]:
    return Pairs(), {"x": torch.randn(6, 8), "target": torch.randn(6)}


class Translated(nn.Module):
    """torch's encoder and decoder with masks of their own, padding, and a latent variable with a distribution."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(30, size, padding_idx=0)
        self.body = nn.Transformer(size, 2, 1, 1, 2 * size, 0.0, batch_first=True)
        self.latent, self.head = nn.Linear(size, 2 * size), nn.Linear(size, 30)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding, given = source == 0, target[:, :-1]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        out = self.body(
            self.words(source),
            self.words(given),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        mean, log_scale = self.latent(out.mean(1)).chunk(2, -1)
        found = torch.distributions.Normal(mean, log_scale.exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        scores = self.head(out + mean[:, None])
        loss = F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        return (
            loss
            + 0.1 * torch.distributions.kl_divergence(found, prior).mean()
            - 0.01 * found.log_prob(mean.detach()).mean()
        )


def build_translated(**_: Any) -> tuple[nn.Module, Any]:
    source, target = torch.randint(1, 30, (4, 7)), torch.randint(1, 30, (4, 6))
    source[1, 5:], source[3, 3:], target[2, 4:] = 0, 0, 0
    return Translated(), {"source": source, "target": target}


class Tables(nn.Module):
    """Tables whose gradients are scaled by frequency, or sparse; a layer that no forward reads."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.often, self.seldom = nn.Embedding(9, size, scale_grad_by_freq=True), nn.Embedding(9, size, sparse=True)
        self.head, self.unused = nn.Linear(size, 4), nn.Linear(16, 32)

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.often(words) * self.seldom(words.flip(1))).mean(1)), target)


def build_tables() -> tuple[nn.Module, Any]:
    return Tables(), {"words": torch.randint(0, 9, (6, 5)), "target": torch.randint(0, 4, (6,))}


class Coloured(nn.Module):
    """Convolutions of three channels, there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.back = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 3, 2, 2)
        self.again = nn.Conv2d(3, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.back(torch.tanh(self.inner(x))).sigmoid()).square().mean()


def build_coloured() -> tuple[nn.Module, Any]:
    return Coloured(), {"x": torch.randn(4, 3, 6, 6)}


class Biased(nn.Module):
    """Attention of two heads, with a learned bias for each and one for both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.of_each, self.of_both = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).unflatten(-1, (2, 8)).transpose(1, 2)
        found = F.scaled_dot_product_attention(heads, heads, heads, self.of_each + self.of_both)
        return self.outer(found.transpose(1, 2).flatten(2)).square().mean()


def build_biased() -> tuple[nn.Module, Any]:
    return Biased(), {"x": torch.randn(4, 8, 16)}


class Informed(nn.Module):
    """Takes gradients in its forward: the residual of Burgers' equation, and the penalty of a critic's slope."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.SiLU(), nn.Linear(12, 1))
        self.critic = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 4, 3, 2, 1), nn.ReLU())

    def forward(self, time: Tensor, place: Tensor, image: Tensor) -> Tensor:
        time, place = time.clone().requires_grad_(), place.clone().requires_grad_()
        u = self.field(torch.stack([time, place], 1)).squeeze(1)
        by_time, by_place = torch.autograd.grad(u.sum(), (time, place), create_graph=True)
        (twice_by_place,) = torch.autograd.grad(by_place.sum(), place, create_graph=True)
        image = (0.5 * image).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(image).sum(), image, create_graph=True)
        residual = by_time + u * by_place - 0.1 * twice_by_place
        return residual.square().mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()


def build_informed() -> tuple[nn.Module, Any]:
    return Informed(), {"time": torch.rand(6), "place": torch.randn(6), "image": torch.randn(6, 3, 8, 8)}


class Rotated(nn.Module):
    """Complex numbers in the memory of real ones, their conjugates and those' imaginary parts, and a shape changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = (2 * self.inner(x)).unsqueeze_(1)
        numbers = torch.view_as_complex(rows.reshape(-1, 4, 2))
        turned = torch.polar(torch.ones(4), torch.arange(4.0)) * numbers.conj() * numbers
        mixed = torch.complex(turned.conj().imag * numbers.real, numbers.conj().imag.exp())
        return F.cross_entropy(self.head(torch.relu(self.middle(torch.view_as_real(mixed).flatten(1)))), target)


def build_rotated() -> tuple[nn.Module, Any]:
    return Rotated(), {"x": torch.randn(5, 6), "target": torch.randint(0, 3, (5,))}


GOOD = (
    build_inline,
    build_graph,
    build_bags,
    build_losses,
    build_cells,
    build_messages,
    build_unet,
    build_lstm,
    build_einsum,
    build_tied,
    build_autocast,
    build_inplace,
    build_nano,
    build_moe,
    build_transformer,
    build_group,
    build_checkpointed,
    build_spectral,
    build_modes,
    build_timed,
    build_pairs,
    build_translated,
    build_tables,
    build_informed,
    build_rotated,
)
