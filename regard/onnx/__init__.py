"""Models as ONNX files, for onnxruntime and whatever else runs such."""

from regard.onnx.export import export_onnx

__all__ = ["export_onnx"]
