"""What ops are besides their loops and local form: the other fields of their entries, one fact a call.

An op without a signature has an entry all the same where something is known of it; nothing can be split of it.
"""

from __future__ import annotations

from .registry import describe

describe(
    "detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "bernoulli", "one_hot",
    differentiable=False,
)  # fmt: skip

describe(
    "add", "sub", "neg", "rsub", "sum", "mean", "_to_copy", "to", "type_as", "clone", "alias", "contiguous", "stack", "cat",
    "detach", "lift_fresh_copy",
    linear=True,
)  # fmt: skip

describe(
    "full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty", "scalar_tensor", "fill", "full_like",
    "zeros_like", "ones_like", "expand", "expand_as", "broadcast_to",
    uniform=True,
)  # fmt: skip

describe("clone", "contiguous", copies=True)
describe("linear", "linear_io", "convolution", fresh_gradient=1)
describe("linear", linear_map="out_in")
describe("linear_io", linear_map="in_out")
describe("embedding", fresh_gradient=0)
describe(
    "embedding", "index_select", "gather", "take_along_dim", "index", "take", "_embedding_bag", "_unsafe_index",
    "_unsafe_masked_index",
    reads_rows=True,
)  # fmt: skip

describe(
    "linear", "linear_io", "mm", "addmm", "bmm", "baddbmm", "matmul", "scaled_dot_product_attention",
    tensor_parallel=True,
)  # fmt: skip

describe("scaled_dot_product_attention", dropout=("dropout_p", 0.0), fused_on_gpu=True)
describe("feature_dropout", "alpha_dropout", "feature_alpha_dropout", dropout=("train", False))
describe("lstm", "gru", "rnn_tanh", "rnn_relu", dropout=("dropout", 0.0), draws_by_dropout=True)
describe("scaled_dot_product_attention", draws_by_dropout=True)
describe("dropout", "native_dropout", masks=True)
describe("batch_norm", training=("training", False))
describe("instance_norm", training=("use_input_stats", False))
describe("rrelu", training=("training", False))

describe(
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "convolution",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
    cpu_scratch=True,
)  # fmt: skip
