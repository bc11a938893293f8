"""Updates of a tiny model with FSDP2, on any placement."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from weft.algorithms.methods import supervised
from weft.algorithms.policy_loss import NegativeLogLikelihood
from weft.controllers.backends.backend import Backend
from weft.controllers.driver import Driver
from weft.controllers.placement import Place
from weft.controllers.schedule import Synchronous
from weft.dataflow.graph import group
from weft.dataflow.source import TableSource
from weft.dataflow.tracing import graph
from weft.resharding import sources
from weft.workers.actor import ActorWorker
from weft.workers.dispatch import Dispatch
from weft.workers.reference import ReferenceWorker
from weft.workers.worker import remote


class LookingActor(ActorWorker):
    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        """Return the rank's place, and the squared norm of each parameter, gathered over all ranks."""
        at = self.context
        return {
            "rank": [at.rank, at.world_size, at.local_rank, at.node_rank, at.nodes],
            "squares": {
                name: float(t.double().square().sum()) for name, t in self.engine.named_tensors()
            },
        }


class ReferenceElsewhere(ReferenceWorker):
    """A reference that believes it runs on another machine than the publisher."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        sources.this_machine = lambda: "another machine"

    @remote(dispatch=Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "squares": {
                name: float(t.double().square().sum()) for name, t in self.engine.named_tensors()
            },
        }


def make_model(folder: Path) -> Path:
    """Save a Qwen2 of one layer with random weights, and a placeholder for its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(
        folder
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


@graph
def compared(answers: Any, *, actor: Any, reference: Any) -> Any:
    return actor.update(reference.logprobs(answers), loss=NegativeLogLikelihood())


def updated(
    root: Path, name: str, model: Path, placement: dict[str, Place], backend: Backend
) -> dict[str, Any]:
    """Run two updates on eight rows each of uneven lengths, and return their results.

    The results are losses, gradient norms, and the view of each rank afterwards. A reference, if
    placed, receives the weights after each update.
    """
    prompts = [[5 + i] * (1 + i % 3) for i in range(16)]
    responses = [[(7 * i + k) % 97 for k in range(1 + i % 5)] for i in range(16)]
    answers = TableSource("answers", pa.table({"prompt_ids": prompts, "response_ids": responses}))
    made: dict[str, Any] = {
        "actor": group(LookingActor, name="actor", model=str(model), learning_rate=1e-2)
    }
    if "reference" in placement:
        made["reference"] = group(ReferenceElsewhere, name="reference", model=str(model))
        made["reference"].follows(made["actor"])
    with Driver(
        (compared if "reference" in placement else supervised)(answers, **made),
        schedule=Synchronous(steps=2, prompts_per_step=8),
        placement=placement,
        backend=backend,
        root=root,
        name=name,
        record_every=0,
        progress=False,
    ) as driver:
        _, *metrics = driver.run()
        looks = {who: driver.call(handle, "look") for who, handle in made.items()}
    return {name: [row[f"actor/{name}"] for row in metrics] for name in ("loss", "grad_norm")} | looks
