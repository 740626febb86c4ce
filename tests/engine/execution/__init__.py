"""Tests of app/engine/execution: batch invariance above all."""
