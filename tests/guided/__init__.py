"""Tests of app/guided."""
