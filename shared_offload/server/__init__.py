"""The weight server: a process that holds arenas, so that weights outlive the run.

    folder.py    the socket's private folder: found, verified, locked by one server
    protocol.py  messages: JSON lines, versioned, of limited length
    recipe.py    what a server is asked to hold, and how it is filled
    shelf.py     the models that are held: room for them, filling, leaving
    serve.py     the loop: connections, answers, signals
    client.py    the other end: a run that borrows, a command that asks
    census.py    arenas of this host and who is attached, from /proc

Invariants. A segment is the server's only as long as it is attached: arenas are made by
memory/leader.py as in a run, so whatever kills the server leaves no memory behind, and a run that
is attached keeps its arena. Only processes of the server's own user are answered. A peer costs the
server one bounded buffer and ends by a deadline, whatever it sends or does not send.

Threads: the loop's, which alone changes the shelf; one per arena while it is filled, with the
filler's own and `arena-vigil`, as in a run.

Messages: one request a connection, then one or more answers. `*` repeats while an arena is filled.

    ask {fingerprint, path}     -> {server, nodes, why}
    borrow {fingerprint, node}  -> {state: filling, done}* {state: sealed, ticket, filling}
                                   and the arena stays until the peer hangs up, or for a minute
    hold {order}                -> {state: filling, done, total}* {state: sealed, rows}
    status                      -> {server}, {arena}*, {end}
    stop                        -> {server}, and the end of the connection when all is given back

Any of them may be answered with {error}.
"""
