"""`forge deploy`: a cluster of systemd hosts from one inventory file.

Pure, without files (`schedule` asks systemd):

    kinds           what a host can run: units, ports, order
    table_reader    values of TOML tables, and their errors
    inventory       the inventory's content; `inventory_file` reads it
    schedule        the time of a timer
    contradictions  errors of an inventory as a whole
    rendered        the files and units of a host, and their manifest
    host_files      what the inventory makes of each host
    comparison      a host held against its manifest
    plan            the order of a roll

On the computer that renders:

    assets          units and settings that the distribution brings
    secrets         the CA, certificates, key, passwords and tokens of a cluster
    render          writes the files of every host
    cluster         the hosts, reached by a transport
    apply           installs, starts and restarts; members of etcd by `members`
    check_all       the checks of all hosts
    upgrade         rolls a release, and undoes it
    lock            keeps two commands from one rendered directory
    command         arguments and output

On a host:

    host            its present state
    install         makes it what its files say; `changes` are those of the files
    check           its differences
    etcd_start, bootstrap, drain
"""
