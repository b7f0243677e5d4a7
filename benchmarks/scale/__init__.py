"""What happens past this machine: plans of thousands of ranks, measured; latency, modelled."""
