"""What happens past this machine: plans of thousands of ranks, measured; latency, modelled.

In come a model's shapes and the sizes of its mesh; out go rows, and tables of them. One process
stands for all ranks, and nothing is sent.
"""

from .tables import latency_table, planning_table

__all__ = ["latency_table", "planning_table"]
