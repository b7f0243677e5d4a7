"""Where a clipper's steps can be sent: TensorBoard, Weights & Biases, MLflow, logging, JSON lines.

Each takes ``write(result)`` with a ``ClipResult``, at the cost of its host sync; or, without one,
every step from the clipper's record as soon as it has arrived on the host::

    if rank == 0:  # the caller's choice: nothing here communicates
        clipper.record.send_to(JsonLines("run.jsonl"), TensorBoard("runs/1"))
    ...
    clipper.record.close()

An optional package is imported when its class is used, never before.
"""

from .json_lines import JsonLines
from .sink import Sink
from .standard import StandardLogging
from .trackers import MLflow, TensorBoard, WeightsAndBiases

__all__ = ["JsonLines", "MLflow", "Sink", "StandardLogging", "TensorBoard", "WeightsAndBiases"]
