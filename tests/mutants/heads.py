"""Mutants of attention over K/V heads."""

from mutant import Mutant

NATIVE = ("tests/data_plane/native/test_heads.py",)
EXACT = ("tests/data_plane/model/test_exact.py", "-k", "qwen3-False or qwen2-False")
GQA = "data_plane/model/attention_kinds/gqa.py"

MUTANTS = [
    Mutant("heads-take-turns", path=GQA, tests=EXACT,
           why="query heads take K/V heads in turn instead of in groups that lie together",
           text=".repeat_interleave(self.num_heads // self.num_kv_heads, dim=0)",
           fault=".repeat(self.num_heads // self.num_kv_heads, 1, 1)"),
    Mutant("keys-without-their-norm", path=GQA, tests=EXACT,
           why="keys are rotated and kept without the norm that their family has",
           text="key = self._turned(key, position_B, weights.k_norm, rope)",
           fault="key = self._turned(key, position_B, None, rope)"),
    Mutant("queries-without-their-bias", path=GQA, tests=EXACT,
           why="the bias of the query projection is read and not added",
           text="q = _with_bias(weights.q_proj(wire_q_BC), weights.q_bias)",
           fault="q = weights.q_proj(wire_q_BC)"),
    Mutant("a-whole-head-is-rotated", path="data_plane/native/heads.h", tests=NATIVE,
           why="compiled code rotates all of a head where the family rotates half",
           text="rotate(head, head, of.P, cos, sin, of.is_interleaved);",
           fault="rotate(head, head, of.E, cos, sin, of.is_interleaved);"),
    Mutant("values-of-the-first-group", path="data_plane/native/attention.h", tests=NATIVE,
           why="compiled attention reads every group's values at the first group's place",
           text="keys - g * D + value_at + g * R", fault="keys - g * D + value_at"),
    Mutant("four-heads-share-a-weight", path="data_plane/native/attention.h", tests=NATIVE,
           why="a group of heads that reads values once weighs them by the first head's weights",
           text="const Vector by = splat(weight[h * PAGE + t]);",
           fault="const Vector by = splat(weight[t]);"),
]  # fmt: skip
