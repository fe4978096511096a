"""From a new process to a child that is ready: templates, forks, limits and the sandbox."""
