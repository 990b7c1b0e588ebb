"""What the pass over losses found: data, of which the log's lines and `compile.explain`'s report are two views."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

log = logging.getLogger("torch_dcs_ops.compile")

_said: set[str] = set()


class Reason(enum.Enum):
    """Why a loss is left as it stands; `cure` is what a user can do about it."""

    FEW_LOGITS = "few logits"
    RETURNED = "logits returned"
    USED = "logits used elsewhere"
    OTHER_GRAPH = "logits come into the graph"
    GRAPH_BREAK = "graph break"
    CHANGED = "operands may change"
    MODE = "another mode"
    FORM = "unknown form"
    ERROR = "error"

    @property
    def cure(self) -> str:
        return _CURES[self]


_CURES = {
    Reason.FEW_LOGITS: 'set minimum_logits, an argument of compile.enable(), or the option "dcs.minimum_logits"',
    Reason.RETURNED: (
        "compile a function that returns the loss alone; of a model of transformers, integrations.transformers."
        "fused_loss(model) makes the loss without them"
    ),
    Reason.USED: (
        "compile the loss alone; linear_cross_entropy (lse, predictions), linear_log_probs (entropy) and linear_top_k "
        "give much of what logits are used for"
    ),
    Reason.OTHER_GRAPH: (
        "compile the linear map and the loss together, without a graph break between them, whose line "
        "torch_dcs_ops.compile.explain names"
    ),
    Reason.GRAPH_BREAK: (
        "remove what breaks the graph there (torch.compile with fullgraph=True stops at it); of a model of "
        "transformers, integrations.transformers.fused_loss(model) goes around it"
    ),
    Reason.CHANGED: "write to them after the loss, or to a copy",
    Reason.MODE: "make the logits and their loss in the same mode and transform",
    Reason.FORM: "call torch_dcs_ops.linear_cross_entropy instead",
    Reason.ERROR: "this is an error of torch_dcs_ops; the loss is right, but not fused",
}


@dataclass(frozen=True)
class Finding:
    """A loss in a graph: fused, or left as it stands for a reason."""

    loss: str  # the operation, such as cross_entropy
    place: str  # the line of the user's that it comes from, where that is known
    reason: Reason | None = None  # None: it is fused
    clause: str = ""  # the reason in full, a clause about the loss: "takes logits that ..."

    @property
    def fused(self) -> bool:
        return self.reason is None

    @property
    def cure(self) -> str | None:
        return None if self.reason is None else self.reason.cure

    @property
    def name(self) -> str:
        return f"{self.loss} ({self.place})" if self.place else self.loss

    def __str__(self) -> str:
        if self.reason is None:
            return f"{self.name} is fused with its linear map"
        return f"{self.name} is compiled as it stands: it {self.clause} (cure: {self.cure})"


def say(findings: list[Finding], verb: str = "fused") -> None:
    """Logs how many losses are fused, and of each other one, once, why it is not."""
    for finding in findings:
        text = str(finding)
        if not finding.fused and text not in _said:
            _said.add(text)
            log.log(logging.INFO if finding.reason is Reason.FEW_LOGITS else logging.WARNING, text)
    if count := sum(finding.fused for finding in findings):
        log.info("%s %d linear + cross_entropy as dcs::linear_cross_entropy", verb, count)
