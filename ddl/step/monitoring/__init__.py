"""Figures of the update that are computed when asked for."""

from ddl.step.monitoring.layer_norms import LayerNorms, NormsOfLayers

__all__ = ["LayerNorms", "NormsOfLayers"]
