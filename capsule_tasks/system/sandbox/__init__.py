"""Linux mechanisms that confine a sandbox: Landlock, seccomp, capabilities, private directories."""
