"""Who am I: torchrun's variables, this rank's device, process groups, and the loss of a rank.

    facts.py     what the environment and /proc say; torch-free
    devices.py   which GPU this rank holds
    board.py     small messages between ranks, through torchrun's store
    failure.py   what went wrong where: the one record that all ranks end with
    peers.py     what one rank knows of the others
    watch.py     one thread per rank: notices a lost rank, ends this one
    run.py       `run_ranks`: the frame around a program that runs on several ranks
    group.py     `Ranks`: process groups for tensors
    tensors.py   all to one, and from neighbour to neighbour

Ways a run ends, and who sees to it:

    a rank raises         it publishes the error; the watch of each other rank ends that rank
    a rank disappears     its neighbours on the host miss its pid, other hosts miss its heartbeat
    the store disappears  whoever hosted it (torchrun, or rank 0) is gone
    torchrun disappears   the parent of this process has changed
    SIGINT, SIGTERM       the signal wakes the watch, even while the main thread is in a collective

In each case the main thread gets a moment to unwind, so that `with` blocks release what they hold;
if it cannot (it is stuck in native code), registered cleanups run and the process exits anyway.
Exactly one rank prints the error. A rank that is merely slow is left alone: its watch thread
answers for it.
"""
