"""Mutants of attention over K/V heads."""

from mutant import Mutant

NATIVE = ("tests/data_plane/native/test_heads.py",)
EXACT = ("tests/data_plane/model/test_exact.py", "-k", "qwen3-False or qwen2-False")
GQA = "data_plane/model/attention_kinds/gqa.py"

MUTANTS = [
    Mutant(
        name="heads-take-turns",
        why="query heads take K/V heads in turn instead of in groups that lie together",
        path=GQA,
        text=".repeat_interleave(self.num_heads // self.num_kv_heads, dim=0)",
        fault=".repeat(self.num_heads // self.num_kv_heads, 1, 1)",
        tests=EXACT,
    ),
    Mutant(
        name="keys-without-their-norm",
        why="keys are rotated and kept without the norm that their family has",
        path=GQA,
        text="key = self._turned(key, position_B, weights.k_norm, rope)",
        fault="key = self._turned(key, position_B, None, rope)",
        tests=EXACT,
    ),
    Mutant(
        name="queries-without-their-bias",
        why="the bias of the query projection is read and not added",
        path=GQA,
        text="q = _with_bias(weights.q_proj(wire_q_BC), weights.q_bias)",
        fault="q = weights.q_proj(wire_q_BC)",
        tests=EXACT,
    ),
    Mutant(
        name="a-whole-head-is-rotated",
        why="compiled code rotates all of a head where the family rotates half",
        path="data_plane/native/heads.h",
        text="rotate(head, head, of.P, cos, sin, of.is_interleaved);",
        fault="rotate(head, head, of.E, cos, sin, of.is_interleaved);",
        tests=NATIVE,
    ),
    Mutant(
        name="values-of-the-first-group",
        why="compiled attention reads every group's values at the first group's place",
        path="data_plane/native/attention.h",
        text="keys - g * D + value_at + g * R",
        fault="keys - g * D + value_at",
        tests=NATIVE,
    ),
    Mutant(
        name="four-heads-share-a-weight",
        why="a group of heads that reads values once weighs them by the first head's weights",
        path="data_plane/native/attention.h",
        text="const Vector by = splat(weight[h * PAGE + t]);",
        fault="const Vector by = splat(weight[t]);",
        tests=NATIVE,
    ),
]
