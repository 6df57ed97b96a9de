"""Whoever left something in the basket, and the reminders that were sent."""

from django.db import models


class Customer(models.Model):
    email = models.EmailField(unique=True)

    class Meta:
        db_table = "customer"


class Reminder(models.Model):
    customer = models.ForeignKey(Customer, on_delete=models.CASCADE)
    key = models.CharField(max_length=100)  # of the run: a day's reminder is written once

    class Meta:
        db_table = "reminder"
        constraints = (models.UniqueConstraint(fields=["customer", "key"], name="reminder_once"),)
