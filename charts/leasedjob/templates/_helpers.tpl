{{/* Names and labels. */}}
{{- define "leasedjob.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 36 | trimSuffix "-" -}}
{{- end -}}

{{- define "leasedjob.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 36 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 36 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 36 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select; argument: dict "root" $ "component" NAME. */}}
{{- define "leasedjob.selector" -}}
app.kubernetes.io/name: {{ include "leasedjob.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "leasedjob.labels" -}}
{{ include "leasedjob.selector" . }}
app.kubernetes.io/part-of: leasedjob
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An image's reference; argument: dict "root" $ "image" VALUES. */}}
{{- define "leasedjob.image" -}}
{{- $registry := default .image.registry .root.Values.global.imageRegistry -}}
{{- if $registry }}{{ trimSuffix "/" $registry }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest -}}
@{{ .image.digest }}
{{- else -}}
:{{ default .root.Chart.AppVersion .image.tag }}
{{- end -}}
{{- end -}}

{{- define "leasedjob.imagePullSecrets" -}}
{{- with concat .Values.global.imagePullSecrets .Values.imagePullSecrets | uniq -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "leasedjob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "leasedjob.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* "true" where the operator makes the runs' Secrets. */}}
{{- define "leasedjob.createsSecrets" -}}
{{- if kindIs "invalid" .Values.sidecar.secret.create -}}
{{- empty .Values.watchNamespaces -}}
{{- else -}}
{{- .Values.sidecar.secret.create -}}
{{- end -}}
{{- end -}}

{{/* Database: its Secret, whether the chart makes it, and the volume that the operator mounts. */}}
{{- define "leasedjob.postgresql.fullname" -}}
{{- printf "%s-postgresql" (include "leasedjob.fullname" .) -}}
{{- end -}}

{{- define "leasedjob.database.secretName" -}}
{{- if .Values.database.existingSecret -}}
{{- .Values.database.existingSecret -}}
{{- else if .Values.postgresql.embedded -}}
{{- include "leasedjob.postgresql.fullname" . -}}
{{- else -}}
{{- fail "\n\nLeasedJob needs a PostgreSQL database. Name the Secret with its address and credentials in database.existingSecret (keys: uri, or host, port, dbname, user, password), or set postgresql.embedded=true to try it out with a small one inside the cluster.\n" -}}
{{- end -}}
{{- end -}}

{{- define "leasedjob.database.generatesSecret" -}}
{{- if and .Values.postgresql.embedded (not .Values.database.existingSecret) }}true{{ end -}}
{{- end -}}

{{/* Argument: dict "root" $ "optional" BOOL. Optional where the process itself says best what is missing. */}}
{{- define "leasedjob.database.volume" -}}
name: database
projected:
  defaultMode: 0440
  sources:
    - secret:
        name: {{ include "leasedjob.database.secretName" .root | quote }}
        {{- if .optional }}
        optional: true
        {{- end }}
    {{- with .root.Values.database.ca.existingSecret }}
    - secret:
        name: {{ . | quote }}
        items:
          - key: {{ $.root.Values.database.ca.key | quote }}
            path: ca.crt
    {{- end }}
{{- end -}}

{{- define "leasedjob.migrations.mode" -}}
{{- if ne .Values.migrations.mode "auto" -}}
{{- .Values.migrations.mode -}}
{{- else if .Values.postgresql.embedded -}}
initContainer
{{- else -}}
hook
{{- end -}}
{{- end -}}

{{/* The container that migrates, without `name` and list dash. */}}
{{- define "leasedjob.migrations.container" -}}
image: {{ include "leasedjob.image" (dict "root" . "image" .Values.image) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [leasedjob, migrate, --wait, {{ .Values.migrations.waitSeconds | quote }}]
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
resources:
  {{- toYaml .Values.migrations.resources | nindent 2 }}
terminationMessagePolicy: FallbackToLogsOnError
volumeMounts:
  - name: database
    mountPath: /etc/leasedjob/database
    readOnly: true
  - name: tmp
    mountPath: /tmp
{{- end -}}

{{- define "leasedjob.tmp.volume" -}}
name: tmp
emptyDir: {medium: Memory, sizeLimit: 16Mi}
{{- end -}}

{{/* Settings that a schema can't judge. */}}
{{- define "leasedjob.validate" -}}
{{- if and .Values.watchNamespaces (not .Values.clusterName) -}}
{{- fail "\n\nclusterName is required with watchNamespaces: without cluster-wide rights the operator can't read the cluster's own identity (the UID of kube-system). Choose a name that no other cluster on this database has, and never change it.\n" -}}
{{- end -}}
{{- if and .Values.watchNamespaces .Values.excludeNamespaces -}}
{{- fail "\n\nexcludeNamespaces can't be used with watchNamespaces, which says already what the release serves.\n" -}}
{{- end -}}
{{- if and .Values.postgresql.embedded (eq .Values.migrations.mode "hook") -}}
{{- fail "\n\nmigrations.mode=hook does not work with postgresql.embedded: the hook runs before the database exists. Use auto or initContainer.\n" -}}
{{- end -}}
{{- end -}}
