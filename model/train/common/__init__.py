"""Used by all parts of training: flag types, console messages, interrupts, threads, output directory."""
