"""The sinks, as users import them."""

from .record.logging import (
    JsonLines,
    MLflow,
    Sink,
    StandardLogging,
    TensorBoard,
    WeightsAndBiases,
)

__all__ = ["JsonLines", "MLflow", "Sink", "StandardLogging", "TensorBoard", "WeightsAndBiases"]
