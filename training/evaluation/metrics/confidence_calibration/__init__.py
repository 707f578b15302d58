"""The metric module `confidence_calibration`, in the file of that name."""
