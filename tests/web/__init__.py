"""Tests of the page's JavaScript modules in Node.js."""
