"""Report to Celery what becomes of task messages: acceptance, end, output, failures."""
