"""`forge deploy`: a cluster of systemd hosts from one inventory file.

Pure, without files or processes:

    kinds        what a host can run: units, ports, order
    inventory    the inventory's content and its errors
    contradictions   errors of an inventory as a whole
    rendered     the files and units of a host, and their manifest
    host_files   what the inventory makes of each host

With files and processes:

    assets       units and settings that the distribution brings
    secrets      the CA, certificates, key, passwords and tokens of a cluster
    render       writes the files of every host
    command      arguments and output
"""
