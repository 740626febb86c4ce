"""Tests of app/engine/gpu, on a GPU or in an emulation of one."""
