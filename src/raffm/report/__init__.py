"""Reports: TensorBoard, tables, plots, one HTML page."""
