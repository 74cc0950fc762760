"""Who asks for which experts, as transformers would say it."""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeForCausalLM

from benchmarks.routed.traced_base import read_trace
from examples.moe.text import held_out_documents
from examples.moe.trace import traces


def test_a_trace_holds_the_choices_of_every_token_and_layer(base: Path, tmp_path: Path) -> None:
    documents = held_out_documents(2)
    found, foreseen = traces(base, documents)
    assert foreseen.shape == found.shape
    assert found.shape == (1024, 2, 4)
    assert found.dtype == np.int16
    model = Qwen3MoeForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.tensor([document.ids for document in documents])
    with torch.inference_mode():
        logits = model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
    for layer, scores in enumerate(logits):
        wanted = scores.topk(4, dim=-1).indices.numpy()
        assert (found[:, layer] == wanted).all(-1).mean() > 0.99, "but for ties of rounding"
    np.save(tmp_path / "trace.npy", found)
    np.save(tmp_path / "foreseen.npy", foreseen)
    assert np.array_equal(read_trace(tmp_path / "trace.npy"), found)
    assert np.array_equal(read_trace(tmp_path / "foreseen.npy"), foreseen)


def test_a_layer_foresees_by_the_router_of_the_next(base: Path) -> None:
    """It judges what the layer before it read, before that one's experts have added anything."""
    documents = held_out_documents(2)
    _, foreseen = traces(base, documents)
    model = Qwen3MoeForCausalLM.from_pretrained(base, dtype=torch.float32)
    first, second = model.model.layers
    read: list[torch.Tensor] = []
    first.post_attention_layernorm.register_forward_pre_hook(lambda _, rows: read.append(rows[0]))
    with torch.inference_mode():
        model(input_ids=torch.tensor([document.ids for document in documents]), use_cache=False)
        scores = second.post_attention_layernorm(read[0]) @ second.mlp.gate.weight.T
    wanted = scores.flatten(0, 1).topk(4, dim=-1).indices.numpy()
    assert (foreseen[:, 1] == wanted).all(-1).mean() > 0.99, "but for ties of rounding"
