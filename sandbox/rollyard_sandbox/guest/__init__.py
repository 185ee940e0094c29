"""Code that runs inside the jail: standard library only.

    boot       the jail's first line, and the bottom of every program's stack
    template   a warm interpreter; clones slots on request
    slot       PID 1 of a slot: runs one program at a time and reports what happened to it
    programs   what a request's code runs as
    child      the forked process in which the program runs
    hooks      what libraries hook into fork and exit, kept aside
    box        the run's private file system: files in, files out, proof that it is empty again
    filter     the child's system-call filter
    landlock   a second wall, where the kernel has it
    kernel     the few kernel calls that the standard library lacks
    protocol   messages between worker and PID 1

The package is copied into the jail as ``rollyard_guest``; modules import each other relatively.
"""
