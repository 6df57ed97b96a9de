"""`manage.py remind`: writes a reminder for each customer; goes on where the attempt before has stopped."""

import time

from django.core.management.base import BaseCommand
from django.db import connection, transaction

from leasedjob.workload import Checkpoints, DrainingError, ShutdownState, current_run
from shop.models import Customer, Reminder


class Command(BaseCommand):
    help = "Writes today's reminders."

    def handle(self, *args: object, **options: object) -> None:
        state = ShutdownState.listening()  # SIGTERM, and the sidecar's drain notice
        run = current_run(code="reminders")
        try:
            with run:
                self.remind(state, run)
                run.complete()
                self.stdout.write("all reminded")
        except DrainingError as error:
            self.stdout.write(f"stopped ({error}): the next attempt goes on")

    def remind(self, state: ShutdownState, run) -> None:
        checkpoints = Checkpoints(run)
        with transaction.atomic():
            checkpoints.install(connection.connection)
            last = checkpoints.take(connection.connection) or 0  # closes the checkpoint to the attempts before
        for customer in Customer.objects.filter(id__gt=last).order_by("id"):
            run.raise_if_lost()
            state.signal.raise_if_set()  # this customer is done, the next one isn't begun
            with transaction.atomic():  # the reminder and the checkpoint, or neither
                Reminder.objects.create(customer=customer, key=run.idempotency_key)
                time.sleep(0.05)  # whatever else takes time
                checkpoints.save(connection.connection, customer.id)
            self.stdout.write(f"reminded {customer.email}")
            self.stdout.flush()
