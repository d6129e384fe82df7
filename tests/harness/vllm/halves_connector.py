"""The connector with a planted fault: the rotated key as two halves instead of pairs."""

import torch

import data_plane.prefill.connector.paged_kv as paged_kv
from data_plane.prefill.connector.vllm import NanocpConnector

ROPE_DIM = 64
read_pairs = paged_kv.PagedKv.read


def read_halves(self, blocks, page, num_tokens, num_layers):
    payload = self._payload
    self._payload = lambda kv: payload(halves(kv))
    try:
        return read_pairs(self, blocks, page, num_tokens, num_layers)
    finally:
        self._payload = payload


def halves(kv):
    latent, key = kv[..., :-ROPE_DIM], kv[..., -ROPE_DIM:]
    return torch.cat((latent, key[..., ::2], key[..., 1::2]), dim=-1)


paged_kv.PagedKv.read = read_halves

__all__ = ["NanocpConnector"]
