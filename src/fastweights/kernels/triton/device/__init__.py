"""The kernels: functions that Triton compiles. Importing them imports Triton."""
