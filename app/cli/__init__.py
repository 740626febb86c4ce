"""The verbs of the command line, one file each.

Main names: main() of each file: arguments in, exit code out (0 done, 1 failed, 2 wrong input).
Invariants: A wrong flag or file gets one line on stderr that says what to change, never a traceback.
"""
