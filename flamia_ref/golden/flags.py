"""The flags of cases: what each one says of its case, and which faults in public it comes from."""

from types import MappingProxyType

FLAGS = MappingProxyType(
    {
        "real": "inputs recorded from a model",
        "nan": "NaN is expected in the results (assertpy/assertpy #155, pytorch/pytorch #72194)",
        "empty-document": "a document without tokens (Dao-AILab/flash-attention PR #2568)",
        "partial-block": "a document whose length is no multiple of 32 (DeepWok/mase PR #321)",
        "several-tiles": "a document longer than a tile of 128",
        "grouped-heads": (
            "several query heads share a key/value head "
            "(XunhaoLai/native-sparse-attention-triton #27)"
        ),
        "full": "no causal mask",
        "different-lengths": (
            "a document with other keys than queries (Dao-AILab/flash-attention #282, PR #436)"
        ),
        "dead-rows": "queries that see no key: out 0, lse -infinity (flashinfer-ai/flashinfer #4452)",
        "window": "a sliding window (Dao-AILab/flash-attention #1133, huggingface/transformers #39408)",
        "softcap": "scores through tanh",
        "sink": "a logit a head that belongs to no key",
        "scale-edges": (
            "largest magnitudes at 448 times a power of two, and one bfloat16 beside it "
            "(pytorch/ao PR #1835, microsoft/microxcaling #4)"
        ),
        "subnormal": "subnormal inputs, or scales at their smallest (leanprover/TensorLib PR #99)",
        "zero-blocks": "blocks of zeros, and -0 (huggingface/kernels-community PR #680)",
        "scale-ladder": (
            "the scales of nearly all neighbours differ, along every axis (NVIDIA/Fuser PR #4745)"
        ),
        "scale-padding": (
            "the padding of tiled scales is NaN, and no kernel may read it "
            "(NVIDIA/TransformerEngine PR #1431)"
        ),
        "masked-poison": (
            "NaN or infinity where the mask hides it (tile-ai/tilelang PR #2461, "
            "huggingface/nanoVLM PR #204)"
        ),
        "exact": "every sum is exact, so that any order of additions gives the same bits",
        "ones": "V is one (ROCm/FlyDSL PR #1020)",
        "leak-witness": (
            "two cases that differ in one token: results that may not see it must be equal "
            "(NVIDIA/TransformerEngine #3248, NVIDIA/cudnn-frontend PR #1123)"
        ),
        "leak-control": "such a pair that shares no block, so that a leaking kernel passes too",
        "head-dim-192": "a head dimension of 192, two tiles of 4 blocks; many kernels have none",
    }
)
