"""The process around one program. Only the standard library, and no other part of dataflow: it starts in 30 ms.

Where the system lets a user make namespaces (Linux), the program has no network, sees no process but its own, no device
and no folder in which services have sockets, and can write to its working directory only, which is a file system in
memory; its processes end with the first of them, by the kernel. Elsewhere this process is the parent of all whose own
parent has ended, and kills those that are left. In both cases a filter forbids the system calls that connect to
services, take memory that no limit counts, or reach into other processes.
"""
