"""Recurrent layers: samples are independent, time and features stay whole."""

from __future__ import annotations

from .registry import rule
from .signature import Call, Signature, SignatureBuilder


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: Call) -> Signature | None:
    """`b t i (or t b i), layers b h, weights … -> b t h, layers b h`."""
    spec, *rest = call.inputs
    if len(spec.shape) != 3:
        return None
    builder = SignatureBuilder()
    batch_first = bool(call.args[-1]) if call.args else False
    place = 0 if batch_first else 1
    b = builder.loop("b", spec.shape[place])

    def sequence(tag: str, shape: tuple[int, ...], batch: int):
        return tuple(b if k == batch else builder.loop(f"{tag}{k}", n, whole=True) for k, n in enumerate(shape))

    num_states = 2 if call.name == "lstm" else 1
    states = [sequence(f"h{i}_", s.shape, 1) for i, s in enumerate(rest[:num_states])]
    weights = [builder.opaque(f"w{i}_", s.shape) for i, s in enumerate(rest[num_states:])]
    outs = [sequence("y", call.outputs[0].shape, place)]
    outs += [sequence(f"z{i}_", s.shape, 1) for i, s in enumerate(call.outputs[1:])]
    return builder.build([sequence("x", spec.shape, place), *states, *weights], outs)


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: Call) -> Signature:
    """`b i, states b h, weights … -> b h`: one step of such a layer."""
    spec, *rest = call.inputs
    builder = SignatureBuilder()
    b = builder.loop("b", spec.shape[0])

    def sample(tag: str, size: int):
        return (b, builder.loop(tag, size, whole=True))

    num_states = 2 if call.name == "lstm_cell" else 1
    states = [sample("h", s.shape[1]) for s in rest[:num_states]]
    weights = [builder.opaque(f"w{i}_", s.shape) for i, s in enumerate(rest[num_states:])]
    return builder.build(
        [sample("x", spec.shape[1]), *states, *weights], [sample("h", s.shape[1]) for s in call.outputs]
    )
