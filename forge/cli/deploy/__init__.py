"""`forge deploy`: a cluster of systemd hosts from one inventory file. `command` has the arguments.

`inventory`, pure (`schedule` asks systemd):

    kinds           kinds of instances: units, ports, order
    table_reader    values of TOML tables, and their errors
    inventory       the inventory's content; `inventory_file` reads it
    schedule        the time of a timer
    contradictions  errors of an inventory as a whole

`render`, on the computer of the operator:

    rendered        the files and units of a host, and their manifest
    host_files      files of each host, from the inventory
    assets          units and settings that the distribution brings
    secrets         the CA, certificates, key, passwords and tokens of a cluster
    render          writes the files of every host
    lock            keeps two commands from one rendered directory

`host`, on each host:

    host            its present state
    comparison      a host held against its manifest, pure
    install         makes it what its files say; `changes` are those of the files
    check           its differences
    etcd_start, bootstrap, drain

`cluster`, on the computer of the operator:

    transport       transports of commands to a host
    cluster         the hosts
    plan            the order of a roll, pure
    apply           installs, starts and restarts; members of etcd by `members`
    check_all       the checks of all hosts
    upgrade         rolls a release, and undoes it
"""
