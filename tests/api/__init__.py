"""Tests of app/api: the endpoints, mostly over a real socket."""
