"""Tests of app/engine/guided."""
